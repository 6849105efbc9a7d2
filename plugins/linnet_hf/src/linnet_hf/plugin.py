"""What this distribution offers to Linnet. Imports nothing but Linnet."""

from linnet.plugins.descriptors import Backend, BenchMethod, Capability, Exporter
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


@hookimpl
def linnet_register_exporters() -> list[Exporter]:
    """Checkpoints for Transformers, vLLM, SGLang and TGI."""
    return [
        Exporter(
            name="hf",
            target="linnet_hf.export:TransformersExporter",
            title="Transformers checkpoint, for vLLM, SGLang and TGI",
            dtypes=("f32", "bf16", "f16"),
            extra="linnet[hf]",
            engines=("transformers", "vllm"),
            api_version=1,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """Transformers as users run it, and compiled with a static cache."""
    return [
        BenchMethod(
            name=name,
            target=target,
            title=title,
            group="PyTorch",
            dtypes=("f32", "bf16", "f16"),
            requires=("torch", "transformers"),
            extra="linnet[hf]",
            api_version=1,
        )
        for name, target, title in (
            ("transformers", "linnet_hf.bench:Eager", "Transformers"),
            ("transformers-compiled", "linnet_hf.bench:Compiled", "Transformers, compiled"),
        )
    ]
