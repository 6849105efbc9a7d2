"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """The PyTorch backend."""
    return [
        Backend(
            name="torch",
            target="linnet_torch.backend:TorchBackend",
            title="PyTorch",
            modes=("eager",),
            devices=("cpu", "cuda"),
            dtypes=("f32", "bf16", "f16"),
            capabilities=frozenset(
                {Capability.FORWARD, Capability.CACHE, Capability.CHOICE, Capability.SOURCE}
            ),
            requires=("torch",),
            extra="linnet[torch]",
            priority=100,
            api_version=1,
        )
    ]
