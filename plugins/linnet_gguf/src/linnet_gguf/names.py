"""Tensor names and row orders of GGUF's ``llama`` architecture and its kin, both ways.

llama.cpp rotates neighbouring rows of a head together, Transformers rows half a head apart, so
conversion interleaves the rows of every query and key head.
"""

import re
from collections.abc import Mapping

import numpy as np

from linnet.weights.checkpoint import Array

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTATED = ("attn_q", "attn_k")
"""Tensors whose rows are interleaved by head, weights and biases."""
ROPE_FACTORS = "rope_freqs.weight"
"""A table computed from the config, not a parameter."""

_GGUF = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_TRANSFORMERS = re.compile(r"(?P<at>[a-z.]+)\.(0|[1-9][0-9]{0,5})\.([a-z0-9_.]+)\.(weight|bias)")
LAYERS = "model.layers"


def to_transformers(
    name: str,
    layer: Mapping[str, str] = LAYER,
    top: Mapping[str, str] = TOP,
    layers: str = LAYERS,
) -> str | None:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; None if unknown."""
    match = _GGUF.fullmatch(name)
    if match is None or match[2] not in layer:
        return top.get(name)
    return f"{layers}.{match[1]}.{layer[match[2]]}.{match[3]}"


def to_gguf(
    name: str,
    layer: Mapping[str, str] = LAYER,
    top: Mapping[str, str] = TOP,
    layers: str = LAYERS,
) -> str | None:
    """The inverse of ``to_transformers``."""
    match = _TRANSFORMERS.fullmatch(name)
    if match is None or match["at"] != layers:
        return next((theirs for theirs, ours in top.items() if ours == name), None)
    for theirs, ours in layer.items():
        if ours == match[3]:
            return f"blk.{match[2]}.{theirs}.{match[4]}"
    return None


def is_rotated(name: str) -> bool:
    """Whether the GGUF tensor's rows are interleaved."""
    match = _GGUF.fullmatch(name)
    return match is not None and match[2] in ROTATED


def interleaved(heads: int, head_dim: int) -> Array:
    """For each row of the GGUF tensor, the row of the Transformers tensor that it is.

    Keys are counted by their own heads: ``heads`` is the number of key heads for ``attn_k``.
    """
    rows = np.arange(heads * head_dim).reshape(heads, 2, head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def halves(heads: int, head_dim: int) -> Array:
    """The inverse of ``interleaved``: for each row of the Transformers tensor, the GGUF row."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
