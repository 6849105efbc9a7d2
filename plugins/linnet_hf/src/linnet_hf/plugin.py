"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, Capability
from linnet.plugins.hookspecs import hookimpl


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """Transformers, eager: it computes logits and is the first choice of reference."""
    return [
        Backend(
            name="transformers",
            target="linnet_hf.backend:TransformersBackend",
            title="Transformers",
            modes=("eager",),
            devices=("cpu", "cuda"),
            dtypes=("f32", "bf16", "f16"),
            capabilities=frozenset({Capability.FORWARD, Capability.REFERENCE}),
            requires=("torch", "transformers"),
            extra="linnet[hf]",
            priority=-10,
            reference_priority=10,
            api_version=1,
        )
    ]
