"""What GGUF's ``gemma3`` has beyond its kin: windows in turn, two rotary bases, norms from one.

llama.cpp has the turn of the layers, the local base and the attention scale in its code; they are
the same for every Gemma 3 there is, but for the scale of the largest.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array, StoredTensor
from linnet_gguf.container import Value
from linnet_gguf.metadata import Metadata

PATTERN = 6
"""Every sixth layer sees everything, the others a window."""
LOCAL_BASE = 10000.0
"""The rotary base of the layers with a window."""
LARGEST = 62
"""Layers of the 27B model, whose attention scale is of another kind."""
ACTIVATION = "gelu_pytorch_tanh"


def layer_types(layers: int) -> list[str]:
    """The kind of each layer, in Transformers' words."""
    return [
        "sliding_attention" if (layer + 1) % PATTERN else "full_attention"
        for layer in range(layers)
    ]


def attention_scalar(layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """``query_pre_attn_scalar``: what llama.cpp divides by, squared."""
    return hidden // heads if layers == LARGEST else head_dim


def settings(meta: Metadata, config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """The keys of ``config.json`` that replace or join those of a Llama."""
    if not window:
        raise meta.error("does not state gemma3.attention.sliding_window: convert it again")
    local = meta.optional("gemma3.rope.freq_base_swa", float) or LOCAL_BASE
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if meta.optional(f"gemma3.{key}", float):
            raise meta.error(f"sets gemma3.{key}, which Gemma 3 does not have")
    pattern = meta.optional("gemma3.attention.sliding_window_pattern", int)
    if pattern not in (None, PATTERN):
        raise meta.error(f"gemma3.attention.sliding_window_pattern is {pattern}, not {PATTERN}")
    rope = dict(config["rope_parameters"])
    return {
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": attention_scalar(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["head_dim"],
        ),
        "sliding_window": window,
        "sliding_window_pattern": PATTERN,
        "layer_types": layer_types(int(config["num_hidden_layers"])),
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        },
    }


def norm_from_one(stored: StoredTensor) -> StoredTensor:
    """A norm as Transformers stores it. Exact for every scale from a half to two."""
    read = stored.read
    return replace(stored, dtype=DType.F32, read=lambda: read().astype(np.float32) - np.float32(1))


def norm_itself(name: str, read: Callable[[], Array], notes: list[str]) -> Callable[[], Array]:
    """The way back: a reader of the norm as GGUF stores it, and a note where that rounds."""
    values = read().astype(np.float32)
    whole = values + np.float32(1)
    if not np.array_equal(whole - np.float32(1), values):
        notes.append(f"{name} is stored as its sum with one, which f32 rounds")
    return lambda: whole


def keys(model: BoundModel) -> dict[str, Value]:
    """The keys of the file beyond its kin's. Raises UnavailableError for another model."""
    c = model.describe
    sliding = c["ropes"]["sliding_attention"]
    sizes = {window for window in c["windows"] if window is not None}
    turn = [kind == "sliding_attention" for kind in layer_types(c["layers"])]
    stated = {
        "layer_types": ([window is not None for window in c["windows"]], turn),
        "rope_local_base_freq": (sliding["theta"], LOCAL_BASE),
        "the local rope_type": (sliding["kind"], "default"),
        "query_pre_attn_scalar": (
            c["query_scalar"],
            attention_scalar(c["layers"], c["hidden"], c["heads"], c["head_dim"]),
        ),
    }
    for name, (value, fixed) in stated.items():
        if value != fixed:
            raise UnavailableError(
                f"the config has {name} {value!r}, where llama.cpp's gemma3 has {fixed!r} in its "
                "code"
            )
    if not sizes:
        raise UnavailableError("the config has no sliding_window, which llama.cpp's gemma3 needs")
    return {"attention.sliding_window": sizes.pop()}
