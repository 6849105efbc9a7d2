"""What a page knows beforehand: its rows and their order, who is compared with whom, the bounds.

Rows that are not listed here are shown after those that are, under the group that they state.
"""

from dataclasses import dataclass
from typing import Literal

Side = Literal["peer", "linnet", "export"]
"""Another stack; Linnet running the model; another engine on what Linnet exported."""

PYTORCH, JAX = "PyTorch", "JAX"
ONNX, ENGINES = "ONNX Runtime and TensorRT", "LLM engines"
SERVING = "Serving many requests"


@dataclass(frozen=True)
class Known:
    """A row that every page has, measured or not. ``peers`` are the keys that it replaces."""

    key: str
    title: str
    group: str
    side: Side = "peer"
    peers: tuple[str, ...] = ()


_TORCH = ("transformers", "transformers-compiled")
_ONNX = ("optimum-onnx", "ort-genai")
KNOWN = {
    row.key: row
    for row in (
        Known("transformers", "Transformers", PYTORCH),
        Known("transformers-compiled", "Transformers, compiled", PYTORCH),
        Known("linnet-torch-eager", "Linnet, generated PyTorch", PYTORCH, "linnet", _TORCH),
        Known("linnet-torch-inductor", "Linnet, inductor", PYTORCH, "linnet", _TORCH),
        Known("linnet-torch-cudagraphs", "Linnet, CUDA graphs", PYTORCH, "linnet", _TORCH),
        Known("kerashub", "KerasHub", JAX),
        Known("linnet-stablehlo", "Linnet, StableHLO", JAX, "linnet", ("kerashub",)),
        Known("linnet-jax", "Linnet, generated JAX", JAX, "linnet", ("kerashub",)),
        Known("optimum-onnx", "optimum-onnx", ONNX),
        Known("ort-genai", "ONNX Runtime GenAI", ONNX),
        Known("linnet-ort", "Linnet, ONNX Runtime", ONNX, "linnet", _ONNX),
        Known("linnet-tensorrt", "Linnet, TensorRT", ONNX, "linnet", _ONNX),
        Known("vllm", "vLLM", ENGINES),
        Known("vllm-export", "vLLM on Linnet's export", ENGINES, "export", ("vllm",)),
        Known("sglang", "SGLang", ENGINES),
        Known("sglang-export", "SGLang on Linnet's export", ENGINES, "export", ("sglang",)),
        Known("tgi", "TGI", ENGINES),
        Known("tgi-export", "TGI on Linnet's export", ENGINES, "export", ("tgi",)),
        Known("llamacpp-original", "llama.cpp on the model's own GGUF", ENGINES),
        Known("llamacpp", "llama.cpp on Linnet's GGUF", ENGINES, "export", ("llamacpp-original",)),
        Known("serve-linnet-torch", "linnet.serve, PyTorch", SERVING, "linnet", ("serve-vllm",)),
        Known("serve-linnet-jax", "linnet.serve, XLA", SERVING, "linnet", ("serve-vllm",)),
        Known("serve-linnet-ort", "linnet.serve, ONNX Runtime", SERVING, "linnet", ("serve-vllm",)),
        Known("serve-vllm", "vLLM", SERVING),
        Known("serve-vllm-export", "vLLM on Linnet's export", SERVING, "export", ("serve-vllm",)),
        Known("serve-sglang", "SGLang", SERVING),
        Known(
            "serve-sglang-export", "SGLang on Linnet's export", SERVING, "export", ("serve-sglang",)
        ),
        Known("serve-tgi", "TGI", SERVING),
        Known("serve-tgi-export", "TGI on Linnet's export", SERVING, "export", ("serve-tgi",)),
        Known("triton-vllm", "Triton, vLLM backend", SERVING),
        Known("triton-linnet", "Triton, linnet.serve backend", SERVING, "linnet", ("triton-vllm",)),
        Known("transformers-batched", "Transformers, batched", SERVING),
        Known("kerashub-static", "KerasHub, static batches", SERVING),
    )
}
GROUPS = tuple(dict.fromkeys(row.group for row in KNOWN.values()))
PLACE = {key: place for place, key in enumerate(KNOWN)}


@dataclass(frozen=True)
class Contest:
    """A claim that a page makes: ``pairs`` of sides, each the fastest right row of some keys.

    ``small`` contests, of one engine with itself, are stated in per cent.
    """

    anchor: str
    title: str
    metric: str
    pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    small: bool = False


def _ours(*groups: str) -> tuple[str, ...]:
    rows = (row for row in KNOWN.values() if row.side == "linnet" and row.group in groups)
    return tuple(row.key for row in rows if row.key != "triton-linnet")


def _exports(*engines: str) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    return tuple(((f"{engine}-export",), (engine,)) for engine in engines)


CONTESTS = (
    Contest(
        "vllm-one",
        "vLLM, one request",
        "decode_tok_s",
        ((_ours(PYTORCH, JAX, ONNX), ("vllm",)),),
    ),
    Contest("pytorch", "Transformers, in PyTorch", "decode_tok_s", ((_ours(PYTORCH), _TORCH),)),
    Contest("jax", "KerasHub, in JAX", "decode_tok_s", ((_ours(JAX), ("kerashub",)),)),
    Contest("onnx", "ONNX Runtime's own stacks", "decode_tok_s", ((_ours(ONNX), _ONNX),)),
    Contest("vllm-serving", "vLLM, serving", "serve_tok_s", ((_ours(SERVING), ("serve-vllm",)),)),
    Contest(
        "triton",
        "vLLM, behind Triton",
        "serve_tok_s",
        ((("triton-linnet",), ("triton-vllm",)),),
    ),
    Contest(
        "exports",
        "the same engines, on Linnet's exports",
        "decode_tok_s",
        (*_exports("vllm", "sglang", "tgi"), (("llamacpp",), ("llamacpp-original",))),
        small=True,
    ),
    Contest(
        "exports-serving",
        "the same engines serving Linnet's exports",
        "serve_tok_s",
        _exports("serve-vllm", "serve-sglang", "serve-tgi"),
        small=True,
    ),
)


@dataclass(frozen=True)
class Bound:
    """How far from the reference a right row may be: its largest difference, or its mean KL."""

    measure: Literal["max_abs", "kl"]
    most: float


COARSENESS = ("f64", "f32", "f16", "bf16")
BOUNDS = {
    "f64": Bound("max_abs", 0.01),
    "f32": Bound("max_abs", 0.01),
    "f16": Bound("max_abs", 0.5),
    "bf16": Bound("max_abs", 2.0),
    "q8_0": Bound("kl", 0.01),
    "int8": Bound("kl", 0.01),
    "q4_0": Bound("kl", 1.0),
    "q4_1": Bound("kl", 1.0),
    "int4": Bound("kl", 1.0),
}
"""By what a row computes in, or by the reference's dtype where that is the coarser of the two."""


def bound_of(dtype: str, reference: str) -> tuple[str, Bound | None]:
    """The bound of a row's dtype beside the reference's, and the dtype whose bound it is."""
    if dtype in COARSENESS and reference in COARSENESS:
        dtype = max(dtype, reference, key=COARSENESS.index)
    return dtype, BOUNDS.get(dtype)
