"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """The JAX backend."""
    return [
        Backend(
            name="jax",
            target="linnet_jax.backend:JaxBackend",
            title="JAX",
            modes=("jax",),
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
