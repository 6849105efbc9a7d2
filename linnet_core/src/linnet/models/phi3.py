"""Phi-3: Llama's layers with fused linears: one for queries, keys and values, one for gate and up.

Only a part of each head may be rotated. The long-context models scale positions by one of two
tables, chosen by the length of the text so far (``longrope``); they are refused by name.
"""

from collections.abc import Mapping
from typing import Any

from linnet.errors import ConfigError
from linnet.models.config import Reader
from linnet.models.decoder import (
    SILU,
    DecoderFamily,
    Sizes,
    Windows,
    read_activation,
    read_one_window,
    read_sizes,
    read_tie,
)
from linnet.models.llama import CausalLM, Layer, RotarySizes
from linnet.models.rope import Rope, read_rope
from linnet.spec import Block, Decoder, KVCache, Linear, Span, Tensor
from linnet.spec import composites as ops


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    sizes = read_sizes(read, rms_eps=1e-5, max_positions=4096)
    read_activation(read, "Phi-3", "hidden_act", SILU)
    result = RotarySizes(
        **vars(sizes),
        rope=read_plain_rope(read, sizes),
        windows=read_windows(read, sizes.layers),
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


def read_plain_rope(read: Reader, sizes: Sizes) -> Rope:
    """Rotary settings without scaling. Transformers takes ``su`` and ``yarn`` for ``longrope``."""
    for block in ("rope_parameters", "rope_scaling"):
        stated = read.optional(block, dict) or {}
        kind = stated.get("rope_type", stated.get("type", "default"))
        if kind != "default":
            raise ConfigError(
                f"{block} has the type {kind!r}: Phi-3 scales by tables that change with the "
                "length of a text (longrope), which is not supported"
            )
    return read_rope(read, sizes.head_dim, sizes.max_positions, partial=True)


def read_windows(read: Reader, layers: int) -> Windows:
    """One window for all layers, or none."""
    window = read.optional("sliding_window", int)
    if window is not None:
        window = read.size("sliding_window")
    return read_one_window(read, "Phi-3", window, layers)


class Attention(Block):
    """Grouped-query attention with rotary positions, of one linear for all three."""

    def __init__(self, c: Sizes, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = window
        self.qkv_proj = Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden)
        self.cache = KVCache(c.kv_heads, c.head_dim)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_dim
        qkv = self.qkv_proj(x)
        keys, values = heads * size, (heads + kv_heads) * size
        q = ops.reshape(ops.slice_last(qkv, 0, keys), batch, length, heads, size)
        k = ops.reshape(ops.slice_last(qkv, keys, values), batch, length, kv_heads, size)
        v = ops.slice_last(qkv, values, values + kv_heads * size)
        v = ops.reshape(v, batch, length, kv_heads, size)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        k, v = self.cache(k, v, span)
        y = ops.attention(q, k, v, span.positions, scale=size**-0.5, window=self.window)
        return self.o_proj(ops.reshape(y, batch, length, heads * size))


class MLP(Block):
    """The gated feed-forward layer, of one linear for gate and up."""

    def __init__(self, c: Sizes) -> None:
        self.ffn = c.ffn
        self.gate_up_proj = Linear(c.hidden, 2 * c.ffn)
        self.down_proj = Linear(c.ffn, c.hidden)

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate = ops.slice_last(both, 0, self.ffn)
        up = ops.slice_last(both, self.ffn, 2 * self.ffn)
        return self.down_proj(ops.swiglu(gate, up))


class Phi3(DecoderFamily[RotarySizes]):
    """The family: what the plugin descriptor points to."""

    name = "phi3"

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: RotarySizes) -> Decoder:
        """The same layer, ``config.layers`` times."""
        c = config
        return CausalLM(c, [Layer(c, Attention(c, window), MLP(c)) for window in c.windows])
