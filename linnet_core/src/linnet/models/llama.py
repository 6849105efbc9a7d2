"""Llama, and whatever else has a Llama config: SmolLM2, TinyLlama, Llama 3.

Names follow Transformers' ``modeling_llama``, so a parameter's path is its tensor's name.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from linnet.errors import ConfigError
from linnet.models.config import Reader
from linnet.models.rope import Rope, read_rope
from linnet.spec import (
    Block,
    Decoder,
    Embedding,
    KVCache,
    Linear,
    Program,
    RMSNorm,
    Span,
    Tensor,
    trace_decoder,
)
from linnet.spec import composites as ops
from linnet.weights.binding import BoundModel, bind_parameters
from linnet.weights.checkpoint import Checkpoint
from linnet.weights.ties import is_tied

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
"""Rotary tables that old checkpoints store; the config says the same."""
MAX_LAYERS, MAX_HEAD_DIM = 1000, 65536
"""Far above any model; a program of more would take long to trace."""


@dataclass(frozen=True)
class LlamaConfig:
    """What decides the program. ``windows`` has an entry for each layer; None sees everything."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms_eps: float
    max_positions: int
    rope: Rope
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool
    tied: bool


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[LlamaConfig, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)  # only to have it checked: ``tied`` is what binding made of it
    layers = read.size("num_hidden_layers", at_most=MAX_LAYERS)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if read.optional("head_dim", int) is None and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of {heads} heads: state head_dim"
        )
    head_dim = read.size("head_dim", hidden // heads, at_most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}, which rotary positions cannot halve")
    activation = read.optional("hidden_act", str)
    if activation not in (None, "silu", "swish"):
        raise ConfigError(f"hidden_act is {activation!r}; the Llama family has 'silu'")
    eps = read.default("rms_norm_eps", 1e-6)
    if not eps > 0:
        raise ConfigError(f"rms_norm_eps is {eps}, not positive")
    max_positions = read.default("max_position_embeddings", 2048)
    read.size("max_position_embeddings", max_positions)
    result = LlamaConfig(
        vocab=read.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.size("intermediate_size"),
        rms_eps=eps,
        max_positions=max_positions,
        rope=read_rope(read, head_dim, max_positions),
        windows=read_windows(read, layers),
        # Absence means false to Transformers; binding would find a bias that is there.
        attention_bias=read.optional("attention_bias", bool) or False,
        mlp_bias=read.optional("mlp_bias", bool) or False,
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


def read_tie(read: Reader) -> bool | None:
    """Whether the config says that the head is the embedding; None where it does not say."""
    return read.optional("tie_word_embeddings", bool)


def read_windows(read: Reader, layers: int) -> tuple[int | None, ...]:
    """How many tokens each layer sees, the token itself included; None for all of them."""
    window = read.optional("sliding_window", int)
    if window is not None:
        window = read.size("sliding_window")
    if read.optional("use_sliding_window", bool) is False:
        window = None
    kinds = read.optional("layer_types", list)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but there are {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"layer_types has {kind!r}; the Llama family has full_attention and "
                "sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, but no sliding_window is in use")
    if "sliding_attention" in kinds:
        # Its cache drops what is outside, yet its mask lets a forward over many tokens see it.
        read.notes.append(
            f"sliding_window {window} holds for every token; Transformers' Llama applies it only "
            "to what it decodes from its cache"
        )
    else:
        read.optional("max_window_layers", int)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Attention(Block):
    """Grouped-query attention with rotary positions."""

    def __init__(self, c: LlamaConfig, window: int | None) -> None:
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.window = window
        bias = c.attention_bias
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

    def __init__(self, c: LlamaConfig) -> None:
        self.gate_proj = Linear(c.hidden, c.ffn, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden, c.ffn, bias=c.mlp_bias)
        self.down_proj = Linear(c.ffn, c.hidden, bias=c.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(Block):
    """Attention and feed-forward, each normalised before and added to its input after."""

    def __init__(self, c: LlamaConfig, window: int | None) -> None:
        self.input_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.self_attn = Attention(c, window)
        self.post_attention_layernorm = RMSNorm(c.hidden, c.rms_eps)
        self.mlp = MLP(c)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, span: Span) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, span)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(Block):
    """Everything below the head."""

    def __init__(self, c: LlamaConfig) -> None:
        self.rope = c.rope
        self.embed_tokens = Embedding(c.vocab, c.hidden)
        self.layers = [Layer(c, window) for window in c.windows]
        self.norm = RMSNorm(c.hidden, c.rms_eps)

    def __call__(self, tokens: Tensor, span: Span) -> Tensor:
        cos, sin = ops.rope_table(
            span.positions, frequencies=self.rope.frequencies, scale=self.rope.scale
        )
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, span)
        return self.norm(x)


class LlamaForCausalLM(Decoder):
    """Tokens to logits."""

    def __init__(self, c: LlamaConfig) -> None:
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


class Llama:
    """The family: what the plugin descriptor points to."""

    def program(self, config: Mapping[str, Any]) -> Program:
        """The program for a config alone; an unstated tie is untied, as in Transformers."""
        typed, _ = read_config(config, tied=read_tie(Reader(config)) or False)
        return trace_decoder("llama", LlamaForCausalLM(typed))

    def bind(self, checkpoint: Checkpoint) -> BoundModel:
        """The model of a checkpoint. Raises ConfigError or BindingError."""
        flag = read_tie(Reader(checkpoint.config))
        tied, tie_note = is_tied(checkpoint, parameter=HEAD, tied_to=EMBEDDING, flag=flag)
        config, notes = read_config(checkpoint.config, tied)
        program = trace_decoder("llama", LlamaForCausalLM(config))
        return BoundModel(
            program=program,
            checkpoint=checkpoint,
            parameters=bind_parameters(
                program, checkpoint, ignore=IGNORED, prefixes=("", "model.")
            ),
            vocab=config.vocab,
            max_positions=config.max_positions,
            describe=asdict(config),
            notes=(*notes, *([tie_note] if tie_note else [])),
        )
