"""Llama, and whatever else has a Llama config: SmolLM2, TinyLlama, Llama 3.

Names follow Transformers' ``modeling_llama``, so a parameter's path is its tensor's name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linnet.models.config import Reader
from linnet.models.decoder import (
    FULL,
    SILU,
    SLIDING,
    DecoderFamily,
    Sizes,
    Windows,
    read_activation,
    read_kinds,
    read_sizes,
    read_tie,
)
from linnet.models.rope import Rope, read_rope
from linnet.spec import Block, Decoder, Embedding, KVCache, Linear, RMSNorm, Span, Tensor
from linnet.spec import composites as ops

ROTARY_TABLES = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Rotary tables that old checkpoints store; the config says the same."""


@dataclass(frozen=True)
class RotarySizes(Sizes):
    """The config of Llama's kin. ``windows`` has an entry for each layer; None sees everything."""

    rope: Rope
    windows: Windows
    tied: bool


@dataclass(frozen=True)
class LlamaConfig(RotarySizes):
    """What decides the program."""

    attention_bias: bool
    mlp_bias: bool


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[LlamaConfig, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)  # only to have it checked: ``tied`` is what binding made of it
    sizes = read_sizes(read)
    read_activation(read, "Llama", "hidden_act", SILU)
    result = LlamaConfig(
        **vars(sizes),
        rope=read_rope(read, sizes.head_dim, sizes.max_positions),
        windows=read_windows(read, sizes.layers),
        tied=tied,
        # Absence means false to Transformers; binding would find a bias that is there.
        attention_bias=read.optional("attention_bias", bool) or False,
        mlp_bias=read.optional("mlp_bias", bool) or False,
    )
    read.finish()
    return result, tuple(read.notes)


def read_windows(read: Reader, layers: int) -> Windows:
    """How many tokens each layer sees."""
    window = read.optional("sliding_window", int)
    if window is not None:
        window = read.size("sliding_window")
    if read.optional("use_sliding_window", bool) is False:
        window = None
    windows = read_kinds(read, "Llama", window, [FULL if window is None else SLIDING] * layers)
    if any(windows):
        # Its cache drops what is outside, yet its mask lets a forward over many tokens see it.
        read.notes.append(
            f"sliding_window {window} holds for every token; Transformers' Llama applies it only "
            "to what it decodes from its cache"
        )
    else:
        read.optional("max_window_layers", int)
    return windows


class Attention(Block):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: Sizes, window: int | None, bias: bool = False) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = window
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, bias=bias)
        self.k_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.v_proj = Linear(c.hidden, c.kv_heads * c.head_dim, bias=bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, bias=bias)
        self.cache = KVCache(c.kv_heads, c.head_dim)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        q = ops.reshape(self.q_proj(x), batch, length, self.heads, self.head_dim)
        k = ops.reshape(self.k_proj(x), batch, length, self.kv_heads, self.head_dim)
        v = ops.reshape(self.v_proj(x), batch, length, self.kv_heads, self.head_dim)
        k, v = self.cache(ops.rope(k, cos, sin), v, span)
        scale = self.head_dim**-0.5
        y = ops.attention(
            ops.rope(q, cos, sin), k, v, span.positions, scale=scale, window=self.window
        )
        return self.o_proj(ops.reshape(y, batch, length, self.heads * self.head_dim))


class MLP(Block):
    """The gated feed-forward layer."""

    def __init__(self, c: Sizes, bias: bool = False) -> None:
        self.gate_proj = Linear(c.hidden, c.ffn, bias=bias)
        self.up_proj = Linear(c.hidden, c.ffn, bias=bias)
        self.down_proj = Linear(c.ffn, c.hidden, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(Block):
    """Attention and feed-forward, each normalised before and added to its input after."""

    def __init__(self, c: Sizes, attention: Block, mlp: Block) -> None:
        self.input_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.mlp = mlp

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, span)
        y: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + y


class Model(Block):
    """Everything below the head."""

    def __init__(self, c: RotarySizes, layers: Sequence[Layer]) -> None:
        self.rope = c.rope
        self.embed_tokens = Embedding(c.vocab, c.hidden)
        self.layers = layers
        self.norm = RMSNorm(c.hidden, c.rms_eps)

    def __call__(self, tokens: Tensor, span: Span) -> Tensor:
        cos, sin = ops.rope_table(
            span.positions, frequencies=self.rope.frequencies, scale=self.rope.scale
        )
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, span)
        return self.norm(x)


class CausalLM(Decoder):
    """Tokens to logits, through the layers of a family."""

    def __init__(self, c: RotarySizes, layers: Sequence[Layer]) -> None:
        self.model = Model(c, layers)
        self.lm_head = Linear(
            c.hidden, c.vocab, tied_to=self.model.embed_tokens if c.tied else None
        )

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        """``[B, S]`` to ``[B, S, hidden]``."""
        return self.model(tokens, span)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``."""
        return self.lm_head(hidden)


class Llama(DecoderFamily[LlamaConfig]):
    """The family: what the plugin descriptor points to."""

    name = "llama"
    ignored = (ROTARY_TABLES,)

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[LlamaConfig, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: LlamaConfig) -> Decoder:
        """The same layer, ``config.layers`` times."""
        c = config
        return CausalLM(
            c, [Layer(c, Attention(c, w, c.attention_bias), MLP(c, c.mlp_bias)) for w in c.windows]
        )
