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
            modes=("eager", "inductor", "cudagraphs"),
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
    titles = {
        "Eager": "Linnet, generated PyTorch",
        "Inductor": "Linnet, inductor",
        "CudaGraphs": "Linnet, CUDA graphs",
    }
    return [
        BenchMethod(
            name=f"linnet-torch-{name.lower()}",
            target=f"linnet_torch.bench:{name}",
            title=title,
            group="PyTorch",
            dtypes=("f32", "bf16", "f16"),
            requires=("torch",),
            extra="linnet[torch]",
            api_version=1,
        )
        for name, title in titles.items()
    ]
