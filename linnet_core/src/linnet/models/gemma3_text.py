"""Gemma 3, the text model: norms before and after, windows in turn, two rotary bases.

Most layers see a window and turn by a local base; every so often one sees everything and turns by
a global base. Files hold a norm's scale as its difference from one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from linnet.errors import ConfigError
from linnet.models.config import Reader
from linnet.models.decoder import (
    FULL,
    SLIDING,
    DecoderFamily,
    Sizes,
    Windows,
    read_activation,
    read_kinds,
    read_sizes,
    read_tie,
)
from linnet.models.rope import Rope, read_layer_rope
from linnet.spec import Block, Decoder, DType, Embedding, KVCache, Linear, RMSNorm, Span, Tensor
from linnet.spec import composites as ops
from linnet.weights.encodings import FROM_ONE, Encodings

GELU = ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Gemma3Config(Sizes):
    """What decides the program. ``ropes`` are by layer type; ``query_scalar`` is squared."""

    ropes: Mapping[str, Rope]
    windows: Windows
    query_scalar: float
    attention_bias: bool
    tied: bool


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[Gemma3Config, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    sizes = read_sizes(read, kv_heads=4, head_dim=256, max_positions=131072)
    read_activation(read, "Gemma 3", "hidden_activation", GELU)
    scalar = read.default("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        raise ConfigError(f"query_pre_attn_scalar is {scalar}, not positive")
    result = Gemma3Config(
        **vars(sizes),
        ropes=read_ropes(read, sizes),
        windows=read_windows(read, sizes.layers),
        query_scalar=scalar,
        attention_bias=read.optional("attention_bias", bool) or False,
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


def read_ropes(read: Reader, sizes: Sizes) -> dict[str, Rope]:
    """The rotary table of each type of layer."""
    older = {
        FULL: {"rope_theta": "rope_theta", "rope_scaling": "scaling"},
        SLIDING: {"rope_local_base_freq": "rope_theta"},
    }
    theta = {FULL: 1e6, SLIDING: 1e4}
    return {
        kind: read_layer_rope(
            read, sizes.head_dim, sizes.max_positions, kind, keys=keys, theta=theta[kind]
        )
        for kind, keys in older.items()
    }


def read_windows(read: Reader, layers: int) -> Windows:
    """A window for every layer but each sixth, or as ``layer_types`` says."""
    window = read.optional("sliding_window", int)
    if window is not None or "sliding_window" not in read.config:
        window = read.size("sliding_window", read.default("sliding_window", 4096))
    if read.optional("layer_types", list) is None:
        read.default("sliding_window_pattern", 6)
    pattern = read.size("sliding_window_pattern", 6)
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    return read_kinds(read, "Gemma 3", window, kinds)


class Attention(Block):
    """Grouped-query attention; queries and keys are normalised by head, then rotated."""

    def __init__(self, c: Gemma3Config, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window, self.scale = window, c.query_scalar**-0.5
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
        y = ops.attention(q, k, v, span.positions, scale=self.scale, window=self.window)
        return self.o_proj(ops.reshape(y, batch, length, self.heads * self.head_dim))


class MLP(Block):
    """The feed-forward layer, gated by GELU."""

    def __init__(self, c: Gemma3Config) -> None:
        self.gate_proj = Linear(c.hidden, c.ffn)
        self.up_proj = Linear(c.hidden, c.ffn)
        self.down_proj = Linear(c.ffn, c.hidden)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.gelu(self.gate_proj(x), tanh=True) * self.up_proj(x))


class Layer(Block):
    """Attention and feed-forward, each normalised before and again before it is added."""

    def __init__(self, c: Gemma3Config, window: int | None) -> None:
        self.input_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.self_attn = Attention(c, window)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.mlp = MLP(c)
        self.post_feedforward_layernorm = RMSNorm(c.hidden, c.rms_eps)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), cos, sin, span)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Model(Block):
    """Everything below the head."""

    def __init__(self, c: Gemma3Config) -> None:
        self.ropes, self.windows = c.ropes, c.windows
        self.scale = c.hidden**0.5
        self.embed_tokens = Embedding(c.vocab, c.hidden)
        self.layers = [Layer(c, window) for window in c.windows]
        self.norm = RMSNorm(c.hidden, c.rms_eps)

    def __call__(self, tokens: Tensor, span: Span) -> Tensor:
        tables = {
            kind: ops.rope_table(span.positions, frequencies=rope.frequencies, scale=rope.scale)
            for kind, rope in self.ropes.items()
        }
        # A tensor and not a number: in bf16 the scale itself is rounded, as in training.
        x = self.embed_tokens(tokens) * ops.constant((self.scale,), DType.FLOAT)
        for layer, window in zip(self.layers, self.windows, strict=True):
            cos, sin = tables[FULL if window is None else SLIDING]
            x = layer(x, cos, sin, span)
        return self.norm(x)


class Gemma3ForCausalLM(Decoder):
    """Tokens to logits."""

    def __init__(self, c: Gemma3Config) -> None:
        self.model = Model(c)
        self.lm_head = Linear(
            c.hidden, c.vocab, tied_to=self.model.embed_tokens if c.tied else None
        )

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        """``[B, S]`` to ``[B, S, hidden]``."""
        return self.model(tokens, span)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``."""
        return self.lm_head(hidden)


class Gemma3(DecoderFamily[Gemma3Config]):
    """The family: what the plugin descriptor points to."""

    name = "gemma3_text"
    tied = True
    encodings: ClassVar[Encodings] = {r".*norm\.weight": FROM_ONE}

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[Gemma3Config, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: Gemma3Config) -> Decoder:
        """Layers of two types, in the config's turn."""
        return Gemma3ForCausalLM(config)
