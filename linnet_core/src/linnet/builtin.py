"""What Linnet offers without any plugin installed, as a plugin like any other."""

from linnet.plugins.descriptors import (
    API_VERSION,
    Backend,
    BenchMethod,
    Capability,
    Family,
    Format,
)
from linnet.plugins.hookspecs import hookimpl

FAMILIES = (
    ("llama", "llama:Llama"),
    ("mistral", "mistral:Mistral"),
    ("qwen2", "qwen2:Qwen2"),
    ("qwen3", "qwen3:Qwen3"),
    ("gemma3_text", "gemma3_text:Gemma3"),
    ("phi3", "phi3:Phi3"),
    ("gpt2", "gpt2:GPT2"),
)
"""By Transformers' ``model_type``; a family's file is named after it."""


@hookimpl
def linnet_register_models() -> list[Family]:
    """The families of ``linnet.models``."""
    return [
        Family(
            name=name,
            target=f"linnet.models.{target}",
            model_types=(name,),
            api_version=API_VERSION,
        )
        for name, target in FAMILIES
    ]


@hookimpl
def linnet_register_formats() -> list[Format]:
    """A Transformers folder with safetensors, or one such file."""
    return [
        Format(
            name="safetensors",
            target="linnet.weights.folder:SafetensorsFormat",
            # Pickles are claimed so that they are refused with a reason and a way out.
            suffixes=(".safetensors", ".bin", ".pt", ".pth"),
            markers=(
                "*.safetensors",
                "*.safetensors.index.json",
                "pytorch_model*.bin",
                "consolidated*.pth",
            ),
            api_version=API_VERSION,
        )
    ]


@hookimpl
def linnet_register_backends() -> list[Backend]:
    """The NumPy reference: always there, and the last choice for running a model."""
    return [
        Backend(
            name="reference",
            target="linnet.reference.backend:ReferenceBackend",
            title="NumPy reference",
            modes=("numpy",),
            devices=("cpu",),
            dtypes=("f32", "f64"),
            capabilities=frozenset(
                {
                    Capability.FORWARD,
                    Capability.CACHE,
                    Capability.CHOICE,
                    Capability.REFERENCE,
                }
            ),
            priority=-100,
            reference_priority=-100,
            api_version=API_VERSION,
        )
    ]


@hookimpl
def linnet_register_bench_methods() -> list[BenchMethod]:
    """Rows of the benchmark that nothing measures yet, so that every page says so."""
    return [
        BenchMethod(
            name=name,
            target=f"linnet.bench.declared:{target}",
            title=title,
            group="Serving many requests",
            dtypes=("bf16",),
            serving=True,
            api_version=API_VERSION,
        )
        for name, target, title in (
            ("serve-linnet-torch", "Serve", "linnet.serve, PyTorch"),
            ("serve-linnet-jax", "Serve", "linnet.serve, XLA"),
            ("serve-linnet-ort", "Serve", "linnet.serve, ONNX Runtime"),
            ("triton-vllm", "Triton", "Triton, vLLM backend"),
            ("triton-linnet", "Triton", "Triton, linnet.serve backend"),
        )
    ]
