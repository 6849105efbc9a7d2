"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, BenchMethod, Capability, Exporter
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """The JAX backend."""
    return [
        Backend(
            name="jax",
            target="linnet_jax.backend:JaxBackend",
            title="JAX",
            modes=("jax", "stablehlo"),
            devices=("cpu", "cuda"),
            dtypes=("f32", "bf16", "f16"),
            capabilities=frozenset(
                {Capability.FORWARD, Capability.CACHE, Capability.CHOICE, Capability.SOURCE}
            ),
            requires=("jax", "jaxlib"),
            extra="linnet[jax]",
            priority=50,
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_exporters() -> list[Exporter]:
    """StableHLO modules with their weights."""
    return [
        Exporter(
            name="stablehlo",
            target="linnet_jax.export:StableHLOExporter",
            title="StableHLO modules, for XLA",
            dtypes=("f32", "bf16", "f16"),
            requires=("jax", "jaxlib"),
            extra="linnet[jax]",
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """The JAX backend in each of its modes."""
    titles = {
        "jax": ("Source", "Linnet, generated JAX"),
        "stablehlo": ("StableHLO", "Linnet, StableHLO"),
    }
    return [
        BenchMethod(
            name=f"linnet-{mode}",
            target=f"linnet_jax.bench:{name}",
            title=title,
            group="JAX",
            dtypes=("f32", "bf16", "f16"),
            requires=("jax", "jaxlib"),
            extra="linnet[jax]",
            api_version=1,
        )
        for mode, (name, title) in titles.items()
    ]
