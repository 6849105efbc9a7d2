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


def attention_scalar(config: Mapping[str, Any]) -> int:
    """``query_pre_attn_scalar``: what llama.cpp divides by, squared."""
    if config["num_hidden_layers"] == LARGEST:
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return int(config["head_dim"])


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
        "query_pre_attn_scalar": attention_scalar(config),
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


def keys(config: Mapping[str, Any]) -> dict[str, Value]:
    """The keys of the file beyond its kin's. Raises UnavailableError for another model."""
    stated = {
        "layer_types": (config.get("layer_types"), layer_types(config["num_hidden_layers"])),
        "sliding_window_pattern": (config.get("sliding_window_pattern"), PATTERN),
        "rope_local_base_freq": (_local_base(config), LOCAL_BASE),
        "query_pre_attn_scalar": (config.get("query_pre_attn_scalar"), attention_scalar(config)),
        "hidden_activation": (config.get("hidden_activation"), ACTIVATION),
        "attn_logit_softcapping": (config.get("attn_logit_softcapping"), None),
        "final_logit_softcapping": (config.get("final_logit_softcapping"), None),
    }
    for name, (value, fixed) in stated.items():
        if value is not None and value != fixed:
            raise UnavailableError(
                f"the config has {name} {value!r}, where llama.cpp's gemma3 has {fixed!r} in its "
                "code"
            )
    if not config.get("sliding_window"):
        raise UnavailableError("the config has no sliding_window, which llama.cpp's gemma3 needs")
    return {"attention.sliding_window": int(config["sliding_window"])}


def _local_base(config: Mapping[str, Any]) -> float | None:
    sliding = (config.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(sliding, Mapping):
        return sliding.get("rope_theta")
    return config.get("rope_local_base_freq")


def full_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the rotary settings of the layers that see everything, in one dialect."""
    nested = (config.get("rope_parameters") or {}).get("full_attention")
    flat = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_local_base_freq")}
    if isinstance(nested, Mapping):
        flat = {k: v for k, v in flat.items() if k not in ("rope_theta", "rope_scaling")}
        flat["rope_parameters"] = dict(nested)
    flat.setdefault("rope_theta", 1000000.0)
    return flat
