"""GPT-2: learned positions, layer norms with biases, one linear for queries, keys and values.

Files hold every linear of the layers transposed, may leave ``transformer.`` off the names, and old
ones hold the causal mask of each layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from linnet.errors import ConfigError
from linnet.models.config import Reader
from linnet.models.decoder import (
    MAX_LAYERS,
    DecoderFamily,
    read_activation,
    read_eps,
    read_tie,
)
from linnet.spec import (
    Block,
    Decoder,
    Embedding,
    KVCache,
    LayerNorm,
    Linear,
    Span,
    Tensor,
    apply,
)
from linnet.spec import composites as ops
from linnet.weights.encodings import TRANSPOSED, Encodings

GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu")
"""The first two are the same approximation; the last is exact."""
NOT_COMPUTED = (
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "task_specific_params", "n_ctx"),
    "reorder_and_upcast_attn",
)
"""Keys of other tasks, and of how a softmax in half precision is guarded: here it is in f32."""


@dataclass(frozen=True)
class GPT2Config:
    """What decides the program. ``scales`` are of each layer's attention scores."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    norm_eps: float
    max_positions: int
    scales: tuple[float, ...]
    tanh: bool
    tied: bool


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[GPT2Config, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    layers = read.size("n_layer", at_most=MAX_LAYERS)
    hidden, heads = read.size("n_embd"), read.size("n_head")
    if hidden % heads:
        raise ConfigError(f"n_embd {hidden} is not a multiple of n_head {heads}")
    read.default("n_positions", 1024)
    read.read.update(NOT_COMPUTED)
    result = GPT2Config(
        vocab=read.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=read.size("n_inner", 4 * hidden),
        norm_eps=read_eps(read, "layer_norm_epsilon", 1e-5),
        max_positions=read.size("n_positions", 1024),
        scales=read_scales(read, layers, hidden // heads),
        tanh=read_activation(read, "GPT-2", "activation_function", GELUS) != "gelu",
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


def read_scales(read: Reader, layers: int, head_dim: int) -> tuple[float, ...]:
    """What each layer's scores are multiplied with."""
    scaled = read.optional("scale_attn_weights", bool) is not False
    by_layer = read.optional("scale_attn_by_inverse_layer_idx", bool) or False
    scale = head_dim**-0.5 if scaled else 1.0
    return tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers))


class Attention(Block):
    """Attention without groups, of one linear for all three."""

    def __init__(self, c: GPT2Config, scale: float) -> None:
        self.heads, self.scale = c.heads, scale
        self.c_attn = Linear(c.hidden, 3 * c.hidden, bias=True)
        self.c_proj = Linear(c.hidden, c.hidden, bias=True)
        self.cache = KVCache(c.heads, c.hidden // c.heads)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        batch, length, hidden = x.shape
        assert isinstance(hidden, int)
        qkv = self.c_attn(x)
        q, k, v = (
            ops.reshape(part, batch, length, self.heads, hidden // self.heads)
            for part in (ops.slice_last(qkv, i * hidden, (i + 1) * hidden) for i in range(3))
        )
        k, v = self.cache(k, v, span)
        y = ops.attention(q, k, v, span.positions, scale=self.scale)
        return self.c_proj(ops.reshape(y, batch, length, hidden))


class MLP(Block):
    """The feed-forward layer."""

    def __init__(self, c: GPT2Config) -> None:
        self.tanh = c.tanh
        self.c_fc = Linear(c.hidden, c.ffn, bias=True)
        self.c_proj = Linear(c.ffn, c.hidden, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(ops.gelu(self.c_fc(x), tanh=self.tanh))


class Layer(Block):
    """Attention and feed-forward, each normalised before and added to its input after."""

    def __init__(self, c: GPT2Config, scale: float) -> None:
        self.ln_1 = LayerNorm(c.hidden, c.norm_eps)
        self.attn = Attention(c, scale)
        self.ln_2 = LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        x = x + self.attn(self.ln_1(x), span)
        return x + self.mlp(self.ln_2(x))


class Model(Block):
    """Everything below the head."""

    def __init__(self, c: GPT2Config) -> None:
        self.max_positions = c.max_positions
        self.wte = Embedding(c.vocab, c.hidden)
        self.wpe = Embedding(c.max_positions, c.hidden)
        self.h = [Layer(c, scale) for scale in c.scales]
        self.ln_f = LayerNorm(c.hidden, c.norm_eps)

    def __call__(self, tokens: Tensor, span: Span) -> Tensor:
        # Padding and idle rows stand at positions that the table does not have.
        at = apply("minimum", apply("maximum", span.positions, 0), self.max_positions - 1)
        x = self.wte(tokens) + self.wpe(at)
        for layer in self.h:
            x = layer(x, span)
        return self.ln_f(x)


class GPT2LMHeadModel(Decoder):
    """Tokens to logits."""

    def __init__(self, c: GPT2Config) -> None:
        self.transformer = Model(c)
        self.lm_head = Linear(c.hidden, c.vocab, tied_to=self.transformer.wte if c.tied else None)

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        """``[B, S]`` to ``[B, S, hidden]``."""
        return self.transformer(tokens, span)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., vocab]``."""
        return self.lm_head(hidden)


class GPT2(DecoderFamily[GPT2Config]):
    """The family: what the plugin descriptor points to."""

    name = "gpt2"
    tied = True
    embedding = "transformer.wte.weight"
    prefix = "transformer."
    ignored = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
    encodings: ClassVar[Encodings] = {r".*\.(c_attn|c_proj|c_fc)\.weight": TRANSPOSED}

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[GPT2Config, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: GPT2Config) -> Decoder:
        """The same layer, ``config.layers`` times."""
        return GPT2LMHeadModel(config)
