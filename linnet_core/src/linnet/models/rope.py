"""Rotary settings of a Transformers config, in any of its dialects, as one frequency table.

transformers 5 nests theta and scaling in ``rope_parameters``; before, they were ``rope_theta``
and ``rope_scaling``, and the kind was once spelled ``type``.

Tables are computed in f32, in the order of Transformers' own arithmetic: models are trained with
its roundings. An exact table is off by 1e-7 of the angle, which some positions of SmolLM2 turn
into a difference of 1e-3 in a logit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linnet.errors import ConfigError
from linnet.models.config import Reader, is_number

Table = NDArray[np.float32]


@dataclass(frozen=True)
class Rope:
    """One rotary table: ``size // 2`` frequencies in radians per position, and a factor on both
    cosine and sine.
    """

    theta: float
    kind: str
    frequencies: tuple[float, ...]
    scale: float = 1.0
    settings: tuple[tuple[str, Any], ...] = ()
    """The scaling settings, by name: for people and for exporters."""
    partial: float = 1.0
    """The share of a head's dimensions that is rotated, the first of them."""


def read_rope(config: Reader, size: int, max_positions: int, *, partial: bool = False) -> Rope:
    """The rotary table of all layers. Raises ConfigError where dialects disagree.

    ``size`` is how many dimensions a head has; with ``partial`` the config may have only the first
    of them rotated.
    """
    stated = Stated()
    for block in ("rope_parameters", "rope_scaling"):
        stated.block(block, config.optional(block, dict))
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        stated.add(name, config.optional(name, float), name)
    values = stated.values
    if "rope_theta" not in values:
        values["rope_theta"] = config.default("rope_theta", 10000.0)
    rotated = values.pop("partial_rotary_factor", 1)
    if rotated != 1 and not partial:
        raise ConfigError(
            f"partial_rotary_factor is {short(rotated)}, which this family does not have"
        )
    if not is_number(rotated) or not 0 < rotated <= 1 or int(size * rotated) % 2:
        raise ConfigError(
            f"partial_rotary_factor is {short(rotated)}: of {size} dimensions, not an even number"
        )
    rope = _rope(config, values, int(size * rotated), max_positions)
    return replace(rope, partial=float(rotated))


def read_layer_rope(
    config: Reader,
    size: int,
    max_positions: int,
    layer_type: str,
    *,
    keys: Mapping[str, str],
    theta: float,
) -> Rope:
    """The rotary table of one type of layer, from ``rope_parameters`` or the older keys.

    ``keys`` are what was said at the top before there was ``rope_parameters``: the key, and
    whether it is ``rope_theta`` or a block of scaling. ``theta`` is what neither means, with a
    note. Raises ConfigError where dialects disagree.
    """
    stated = Stated()
    by_type = config.optional("rope_parameters", dict) or {}
    for name, value in by_type.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"rope_parameters.{name} is {short(value)}; this family has them by layer type, "
                f"as in rope_parameters.{layer_type}.{name}"
            )
    stated.block(f"rope_parameters.{layer_type}", by_type.get(layer_type))
    for key, meaning in keys.items():
        if meaning == "rope_theta":
            stated.add(meaning, config.optional(key, float), key)
        else:
            stated.block(key, config.optional(key, dict))
    if "rope_theta" not in stated.values:
        key = next(key for key, meaning in keys.items() if meaning == "rope_theta")
        stated.values["rope_theta"] = config.default(key, theta)
    return _rope(config, stated.values, size, max_positions)


class Stated:
    """Every rotary setting that a config states, in whichever dialect, by its newest name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def block(self, place: str, block: Mapping[str, Any] | None) -> None:
        """Add the settings of a block; its kind was once spelled ``type``."""
        for name, value in (block or {}).items():
            self.add("rope_type" if name == "type" else name, value, f"{place}.{name}")

    def add(self, name: str, value: Any, place: str) -> None:
        """Add one setting, None for one that is not stated."""
        if value is None:
            return
        if isinstance(value, Mapping):
            raise ConfigError(f"{place} is for one layer type, which this family does not have")
        if name in self.values and self.values[name] != value:
            raise ConfigError(
                f"{self.places[name]} is {short(self.values[name])} but {place} is "
                f"{short(value)}: the config contradicts itself; remove one of them"
            )
        self.values[name], self.places[name] = value, place


def _rope(config: Reader, values: dict[str, Any], size: int, max_positions: int) -> Rope:
    """The table of ``size`` rotated dimensions for settings by their newest names."""
    kind, theta = values.pop("rope_type", "default"), values.pop("rope_theta")
    if not is_number(theta) or not 1 < theta < 1e30:
        raise ConfigError(f"rope_theta is {short(theta)}, not a number above 1")
    if kind in ("llama3", "yarn") and "original_max_position_embeddings" not in values:
        values["original_max_position_embeddings"] = max_positions
        config.notes.append(
            f"rope scaling {kind!r} does not state original_max_position_embeddings; assuming "
            f"max_position_embeddings {max_positions}, as Transformers does"
        )

    periods = _periods(theta, size)
    frequencies = np.reciprocal(periods)
    settings = Settings(kind, values)
    scale = 1.0
    if kind == "linear":
        frequencies = frequencies / np.float32(settings.number("factor"))
    elif kind == "llama3":
        frequencies = _llama3(frequencies, settings)
    elif kind == "yarn":
        frequencies = _yarn(theta, periods, settings)
        scale = _yarn_scale(settings)
    elif kind != "default":
        raise ConfigError(
            f"rope scaling {short(kind)} is not supported; supported are default, linear, llama3, "
            "yarn"
        )
    settings.done()
    table = tuple(float(frequency) for frequency in frequencies)
    return Rope(float(theta), kind, table, scale, tuple(sorted(values.items())))


class Settings:
    """The scaling settings of one kind; every one given must be used."""

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kind = kind
        self.values = values
        # These kinds stretch what they have: they need not know how long it was.
        self.used = {"original_max_position_embeddings"} if kind in ("default", "linear") else set()

    def optional(self, name: str) -> float | None:
        """A positive number, or None where it is not given."""
        self.used.add(name)
        value = self.values.get(name)
        if value is not None and not (is_number(value) and 0 < value < 1e30):
            raise ConfigError(
                f"rope scaling {self.kind!r}: {name} is {short(value)}, not a positive number"
            )
        return None if value is None else float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required unless a default is given."""
        value = self.optional(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"rope scaling {self.kind!r} needs a number {name}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        self.used.add(name)
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"rope scaling {self.kind!r}: {name} is {short(value)}, not true or false"
            )
        return value

    def done(self) -> None:
        """Refuse settings that this kind does not know: they would be dropped silently."""
        for name, value in self.values.items():
            if name not in self.used:
                raise ConfigError(f"rope scaling {self.kind!r} does not know {name}={short(value)}")


def _periods(theta: float, size: int) -> Table:
    """``theta ** (2i / size)``: positions per radian."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    base = float(np.float32(theta))
    return np.array([base ** float(exponent) for exponent in exponents], np.float32)


def _llama3(frequencies: Table, settings: Settings) -> Table:
    """Llama 3.1: long wavelengths slowed by ``factor``, short ones kept, blended between."""
    factor = settings.number("factor")
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    original = settings.number("original_max_position_embeddings")
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    lengths = np.reciprocal(frequencies) * (2 * math.pi)
    slow = frequencies / factor
    blend = (np.reciprocal(lengths) * original - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    long, short_ = lengths > original / low, lengths < original / high
    return np.where(long, slow, np.where(short_, frequencies, blended)).astype(np.float32)


def _yarn(theta: float, periods: Table, settings: Settings) -> Table:
    """YaRN: dimensions that turn often are kept, those that turn seldom slowed by ``factor``.

    Source: Peng et al. 2023, arXiv 2309.00071, with the options that Transformers has.
    """
    original = settings.number("original_max_position_embeddings")
    factor = settings.number("factor")
    size = 2 * len(periods)

    def dimension_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(settings.number("beta_fast", 32.0))
    high = dimension_of(settings.number("beta_slow", 1.0))
    if settings.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(len(periods), dtype=np.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    slow, fast = np.reciprocal(factor * periods), np.reciprocal(periods)
    table: Table = (slow * (1 - kept) + fast * kept).astype(np.float32)
    return table


def _yarn_scale(settings: Settings) -> float:
    """What YaRN multiplies cosine and sine with, so that attention stays as sharp."""
    factor = settings.number("factor")
    given = settings.optional("attention_factor")
    above, below = settings.optional("mscale"), settings.optional("mscale_all_dim")

    def sharpen(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given is not None:
        return given
    if above is not None and below is not None:
        return sharpen(above) / sharpen(below)
    return sharpen(1.0)
