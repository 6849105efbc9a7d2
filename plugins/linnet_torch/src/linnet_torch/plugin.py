"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, BenchMethod, Capability
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


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """The PyTorch backend in each of its modes."""
    return [
        BenchMethod(
            name="linnet-torch-eager",
            target="linnet_torch.bench:Eager",
            title="Linnet, generated PyTorch",
            group="PyTorch",
            dtypes=("f32", "bf16", "f16"),
            requires=("torch",),
            extra="linnet[torch]",
            api_version=1,
        )
    ]
