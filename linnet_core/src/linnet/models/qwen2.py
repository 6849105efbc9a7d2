"""Qwen 2 and 2.5: Llama's layers around an attention whose queries, keys and values have biases."""

from collections.abc import Mapping
from typing import Any

from linnet.models.config import Reader
from linnet.models.decoder import (
    SILU,
    DecoderFamily,
    Sizes,
    read_activation,
    read_sizes,
    read_switched_windows,
    read_tie,
)
from linnet.models.llama import MLP, CausalLM, Layer, RotarySizes
from linnet.models.rope import read_rope
from linnet.spec import Block, Decoder, KVCache, Linear, Span, Tensor
from linnet.spec import composites as ops


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    sizes = read_sizes(read, kv_heads=32, max_positions=32768)
    read_activation(read, "Qwen2", "hidden_act", SILU)
    result = RotarySizes(
        **vars(sizes),
        rope=read_rope(read, sizes.head_dim, sizes.max_positions),
        windows=read_switched_windows(read, "Qwen2", sizes.layers),
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


class Attention(Block):
    """Grouped-query attention with rotary positions; only the output has no bias."""

    def __init__(self, c: Sizes, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = window
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, bias=True)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=True)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=True)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden)
        self.cache = KVCache(c.kv_heads, c.head_dim)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        q = ops.reshape(self.q_proj(x), batch, length, self.heads, self.head_dim)
        k = ops.reshape(self.k_proj(x), batch, length, self.kv_heads, self.head_dim)
        v = ops.reshape(self.v_proj(x), batch, length, self.kv_heads, self.head_dim)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        k, v = self.cache(k, v, span)
        scale = self.head_dim**-0.5
        y = ops.attention(q, k, v, span.positions, scale=scale, window=self.window)
        return self.o_proj(ops.reshape(y, batch, length, self.heads * self.head_dim))


class Qwen2(DecoderFamily[RotarySizes]):
    """The family: what the plugin descriptor points to."""

    name = "qwen2"

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: RotarySizes) -> Decoder:
        """The same layer, ``config.layers`` times, but for its window."""
        c = config
        return CausalLM(c, [Layer(c, Attention(c, window), MLP(c)) for window in c.windows])
