"""What families of decoders share: sizes and windows read from a config, and how a model is bound.

Knows no architecture: what is computed stands in each family's own file.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from reprlib import repr as short
from typing import Any, ClassVar, Generic, TypeVar

from linnet.errors import ConfigError
from linnet.models.config import Reader
from linnet.spec import Decoder, Program, trace_decoder
from linnet.weights.binding import BoundModel, bind_parameters
from linnet.weights.checkpoint import Checkpoint
from linnet.weights.encodings import Encodings
from linnet.weights.ties import is_tied

MAX_LAYERS, MAX_HEAD_DIM = 1000, 65536
"""Far above any model; a program of more would take long to trace."""
FULL, SLIDING = "full_attention", "sliding_attention"
SILU = ("silu", "swish")
Windows = tuple[int | None, ...]
"""How many tokens each layer sees, the token itself included; None for all of them."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model with grouped heads and a gated feed-forward layer."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms_eps: float
    max_positions: int


def read_sizes(
    read: Reader,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rms_eps: float = 1e-6,
    max_positions: int = 2048,
) -> Sizes:
    """The sizes of a Transformers config. Raises ConfigError.

    The keywords are what Transformers takes for a key that is absent, with a note: None is as many
    key heads as heads, and ``hidden / heads`` dimensions, without one.
    """
    layers = read.size("num_hidden_layers", at_most=MAX_LAYERS)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    if kv_heads is not None and "num_key_value_heads" not in read.config:
        kv_heads = read.default("num_key_value_heads", kv_heads)
    else:
        kv_heads = read.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim is not None:
        read.default("head_dim", head_dim)
    elif read.optional("head_dim", int) is None and hidden % heads:
        raise ConfigError(
            f"hidden_size {hidden} is not a multiple of {heads} heads: state head_dim"
        )
    head_dim = read.size("head_dim", head_dim or hidden // heads, at_most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}, which rotary positions cannot halve")
    max_positions = read.default("max_position_embeddings", max_positions)
    return Sizes(
        vocab=read.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=read.size("intermediate_size"),
        rms_eps=read_eps(read, "rms_norm_eps", rms_eps),
        max_positions=read.size("max_position_embeddings", max_positions),
    )


def read_eps(read: Reader, name: str, value: float) -> float:
    """What a norm adds to the mean square; ``value`` where it is absent, with a note."""
    eps = read.default(name, value)
    if not eps > 0:
        raise ConfigError(f"{name} is {eps}, not positive")
    return eps


def read_activation(read: Reader, family: str, name: str, known: Sequence[str]) -> str:
    """The activation, one of those that the family has; the first where it is absent."""
    activation = read.optional(name, str)
    if activation not in (None, *known):
        raise ConfigError(f"{name} is {activation!r}; the {family} family has {known[0]!r}")
    return activation or known[0]


def read_tie(read: Reader) -> bool | None:
    """Whether the config says that the head is the embedding; None where it does not say."""
    return read.optional("tie_word_embeddings", bool)


def read_kinds(read: Reader, family: str, window: int | None, kinds: Sequence[str]) -> Windows:
    """The window of each layer, of ``layer_types`` or, where it is absent, of ``kinds``."""
    layers, stated = len(kinds), read.optional("layer_types", list)
    kinds = kinds if stated is None else stated
    if len(kinds) != layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but there are {layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConfigError(
                f"layer_types has {kind!r}; the {family} family has {FULL} and {SLIDING}"
            )
        if kind == SLIDING and window is None:
            raise ConfigError(f"layer_types has {SLIDING}, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_one_window(read: Reader, family: str, window: int | None, layers: int) -> Windows:
    """One window, or none, for all layers: Transformers does not look at ``layer_types`` there."""
    kind = FULL if window is None else SLIDING
    stated = read.optional("layer_types", list)
    if stated is not None and stated != [kind] * layers:
        raise ConfigError(
            f"layer_types is {short(stated)}, but the {family} family has one kind for all "
            f"{layers} layers, which sliding_window {window} makes {kind}"
        )
    return (window,) * layers


def read_switched_windows(read: Reader, family: str, layers: int) -> Windows:
    """Qwen's: off unless switched on, and then from layer ``max_window_layers`` on."""
    window = None
    if read.optional("use_sliding_window", bool):
        window = read.size("sliding_window", read.default("sliding_window", 4096))
    else:
        read.optional("sliding_window", int)
    first = read.optional("max_window_layers", int)
    if first is None and window is not None and read.optional("layer_types", list) is None:
        first = read.default("max_window_layers", 28)
    wide = layers if window is None else min(layers, max(first or 0, 0))
    return read_kinds(read, family, window, [FULL] * wide + [SLIDING] * (layers - wide))


C = TypeVar("C")


class DecoderFamily(ABC, Generic[C]):
    """What a plugin's descriptor points to: a family's config, its model, and its names.

    ``head`` and ``embedding`` are the two that may be tied; ``tied`` is what an unstated tie means
    to Transformers. Files may leave ``prefix`` off every name.
    """

    name: ClassVar[str]
    tied: ClassVar[bool] = False
    head: ClassVar[str] = "lm_head.weight"
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    prefix: ClassVar[str] = "model."
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of tensors that files may hold and no logit depends on."""
    encodings: ClassVar[Encodings] = {}
    """How files hold parameters otherwise than the program has them."""

    @abstractmethod
    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[C, tuple[str, ...]]:
        """The typed config, a dataclass, and notes on what was left open. Raises ConfigError."""

    @abstractmethod
    def model(self, config: C) -> Decoder:
        """The model of a typed config."""

    def program(self, config: Mapping[str, Any]) -> Program:
        """The program for a config alone."""
        stated = read_tie(Reader(config))
        typed, _ = self.read(config, self.tied if stated is None else stated)
        return trace_decoder(self.name, self.model(typed))

    def bind(self, checkpoint: Checkpoint) -> BoundModel:
        """The model of a checkpoint. Raises ConfigError or BindingError."""
        flag = read_tie(Reader(checkpoint.config))
        tied, tie_note = is_tied(
            checkpoint,
            parameter=self.head,
            tied_to=self.embedding,
            flag=True if flag is None and self.tied else flag,
            prefix=self.prefix,
        )
        typed, notes = self.read(checkpoint.config, tied)
        describe = asdict(typed)  # type: ignore[call-overload]
        program = trace_decoder(self.name, self.model(typed))
        return BoundModel(
            program=program,
            checkpoint=checkpoint,
            parameters=bind_parameters(
                program,
                checkpoint,
                ignore=self.ignored,
                prefixes=("", self.prefix),
                encodings=self.encodings,
            ),
            vocab=describe["vocab"],
            max_positions=describe["max_positions"],
            describe=describe,
            notes=(*notes, *([tie_note] if tie_note else [])),
        )
