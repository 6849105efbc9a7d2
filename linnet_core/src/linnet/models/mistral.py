"""Mistral: Llama's layers, each of which sees a window of the last tokens where one is set."""

from collections.abc import Mapping
from typing import Any

from linnet.models.config import Reader
from linnet.models.decoder import (
    SILU,
    DecoderFamily,
    Windows,
    read_activation,
    read_one_window,
    read_sizes,
    read_tie,
)
from linnet.models.llama import MLP, ROTARY_TABLES, Attention, CausalLM, Layer, RotarySizes
from linnet.models.rope import read_rope
from linnet.spec import Decoder


def read_config(config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
    """The typed config and notes on what it left open. Raises ConfigError."""
    read = Reader(config)
    read_tie(read)
    sizes = read_sizes(read, kv_heads=8, max_positions=131072)
    read_activation(read, "Mistral", "hidden_act", SILU)
    result = RotarySizes(
        **vars(sizes),
        rope=read_rope(read, sizes.head_dim, sizes.max_positions),
        windows=read_windows(read, sizes.layers),
        tied=tied,
    )
    read.finish()
    return result, tuple(read.notes)


def read_windows(read: Reader, layers: int) -> Windows:
    """One window for all layers: null is none, and 4096 what an absent key means."""
    window = read.optional("sliding_window", int)
    if window is not None or "sliding_window" not in read.config:
        window = read.size("sliding_window", read.default("sliding_window", 4096))
    return read_one_window(read, "Mistral", window, layers)


class Mistral(DecoderFamily[RotarySizes]):
    """The family: what the plugin descriptor points to."""

    name = "mistral"
    ignored = (ROTARY_TABLES,)

    def read(self, config: Mapping[str, Any], tied: bool) -> tuple[RotarySizes, tuple[str, ...]]:
        """See ``read_config``."""
        return read_config(config, tied)

    def model(self, config: RotarySizes) -> Decoder:
        """The same layer, ``config.layers`` times."""
        c = config
        return CausalLM(c, [Layer(c, Attention(c, window), MLP(c)) for window in c.windows])
