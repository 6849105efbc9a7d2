"""Qwen 3: Llama's layers around an attention that normalises every head's query and key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from linnet.models.config import Reader
from linnet.models.decoder import (
    SILU,
    DecoderFamily,
    read_activation,
    read_sizes,
    read_switched_windows,
    read_tie,
)
from linnet.models.llama import MLP, CausalLM, Layer, RotarySizes
from linnet.models.rope import read_rope
from linnet.spec import Block, Decoder, KVCache, Linear, RMSNorm, Span, Tensor
from linnet.spec import composites as ops


@dataclass(frozen=True)
class Qwen3Config(RotarySizes):
    """What decides the program."""

    attention_bias: bool


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[Qwen3Config, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    sizes = read_sizes(read, kv_heads=32, head_dim=128, max_positions=32768)
    read_activation(read, "Qwen3", "hidden_act", SILU)
    result = Qwen3Config(
        **vars(sizes),
        rope=read_rope(read, sizes.head_dim, sizes.max_positions),
        windows=read_switched_windows(read, "Qwen3", sizes.layers),
        tied=tied,
        attention_bias=read.optional("attention_bias", bool) or False,
    )
    read.finish()
    return result, tuple(read.notes)


class Attention(Block):
    """Grouped-query attention; queries and keys are normalised by head, then rotated."""

    def __init__(self, c: Qwen3Config, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = window
        bias = c.attention_bias
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, bias=bias)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_eps)
        self.cache = KVCache(c.kv_heads, c.head_dim)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        q = ops.reshape(self.q_proj(x), batch, length, self.heads, self.head_dim)
        k = ops.reshape(self.k_proj(x), batch, length, self.kv_heads, self.head_dim)
        v = ops.reshape(self.v_proj(x), batch, length, self.kv_heads, self.head_dim)
        q, k = ops.rope(self.q_norm(q), cos, sin), ops.rope(self.k_norm(k), cos, sin)
        k, v = self.cache(k, v, span)
        scale = self.head_dim**-0.5
        y = ops.attention(q, k, v, span.positions, scale=scale, window=self.window)
        return self.o_proj(ops.reshape(y, batch, length, self.heads * self.head_dim))


class Qwen3(DecoderFamily[Qwen3Config]):
    """The family: what the plugin descriptor points to."""

    name = "qwen3"

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[Qwen3Config, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: Qwen3Config) -> Decoder:
        """The same layer, ``config.layers`` times, but for its window."""
        c = config
        return CausalLM(c, [Layer(c, Attention(c, window), MLP(c)) for window in c.windows])
