"""Rotary settings of a Transformers config, in any of its dialects, as one frequency table.

transformers 5 nests theta and scaling in ``rope_parameters``; before, they were ``rope_theta``
and ``rope_scaling``, and the kind was once spelled ``type``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from linnet.errors import ConfigError
from linnet.models.config import Reader


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
    """The scaling settings, as read: for people and for exporters."""


def read_rope(config: Reader, size: int, max_positions: int) -> Rope:
    """The rotary table for ``size`` dimensions. Raises ConfigError where dialects disagree."""
    new = config.optional("rope_parameters", dict)
    old = config.optional("rope_scaling", dict)
    if new is not None and any(isinstance(value, Mapping) for value in new.values()):
        raise ConfigError("rope_parameters differs by layer type, which this family does not have")

    def agree(name: str, one: Any, other: Any, where: str) -> Any:
        if one is not None and other is not None and one != other:
            raise ConfigError(
                f"rope_parameters.{name} is {one} but {where} is {other}: the config contradicts "
                "itself; remove one of them"
            )
        return one if one is not None else other

    settings = dict(new or {})
    for name, value in (old or {}).items():
        key = "rope_type" if name == "type" else name
        settings[key] = agree(key, settings.get(key), value, f"rope_scaling.{name}")
    theta = agree(
        "rope_theta",
        settings.pop("rope_theta", None),
        config.optional("rope_theta", float),
        "rope_theta",
    )
    kind = agree("type", settings.pop("rope_type", None), settings.pop("type", None), "type")
    kind = kind or "default"
    if theta is None:
        theta = config.default("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not theta > 0:
        raise ConfigError(f"rope_theta is {theta!r}, not a positive number")
    partial = settings.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor is {partial}, which this family does not have")

    frequencies = _unscaled(float(theta), size)
    scale = 1.0
    given = Settings(kind, settings)
    if kind == "linear":
        factor = given.number("factor")
        frequencies = [f / factor for f in frequencies]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, given)
    elif kind == "yarn":
        frequencies, scale = _yarn(float(theta), size, max_positions, given)
    elif kind != "default":
        raise ConfigError(
            f"rope scaling {kind!r} is not supported; supported are default, linear, llama3, yarn"
        )
    given.done()
    return Rope(float(theta), kind, tuple(frequencies), scale, tuple(sorted(settings.items())))


def _unscaled(theta: float, size: int) -> list[float]:
    """``theta ** (-2i / size)``, rounded to f32 where Transformers rounds.

    Models are trained with that table. An exact one is off by 1e-7 of the angle, which some
    positions of SmolLM2 turn into a difference of 1e-3 in a logit.
    """
    f32 = np.float32
    return [float(1 / f32(theta ** float(f32(2 * i) / f32(size)))) for i in range(size // 2)]


class Settings:
    """The scaling settings of one kind; every one given must be used."""

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kind = kind
        self.values = dict(values)
        self.used: set[str] = set()

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required unless a default is given."""
        self.used.add(name)
        value = self.values.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ConfigError(f"rope scaling {self.kind!r} needs a number {name}, not {value!r}")
        return float(value)

    def given(self, name: str) -> bool:
        """Whether the config sets it."""
        return self.values.get(name) is not None

    def done(self) -> None:
        """Refuse settings that this kind does not know: they would be dropped silently."""
        for name in self.values:
            known = name in self.used or self.values[name] is None
            harmless = name == "original_max_position_embeddings" and self.kind in (
                "default",
                "linear",
            )
            if not known and not harmless:
                raise ConfigError(
                    f"rope scaling {self.kind!r} does not know {name}={self.values[name]!r}"
                )


def _llama3(frequencies: list[float], given: Settings) -> list[float]:
    """Llama 3.1: long wavelengths slowed by ``factor``, short ones kept, blended between."""
    factor = given.number("factor")
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    original = given.number("original_max_position_embeddings")
    if high <= low:
        raise ConfigError(f"high_freq_factor {high} must be above low_freq_factor {low}")
    scaled = []
    for frequency in frequencies:
        turns = original * frequency / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency * (blend + (1 - blend) / factor))
    return scaled


def _yarn(
    theta: float, size: int, max_positions: int, given: Settings
) -> tuple[list[float], float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071), with the options that Transformers has."""
    original = given.number("original_max_position_embeddings", float(max_positions))
    factor = given.number("factor")
    beta_fast, beta_slow = given.number("beta_fast", 32.0), given.number("beta_slow", 1.0)
    truncate = bool(given.values.get("truncate", True))
    given.used.update(("truncate", "attention_factor", "mscale", "mscale_all_dim"))

    def mscale(by: float, weight: float = 1.0) -> float:
        return 1.0 if by <= 1 else 0.1 * weight * math.log(by) + 1.0

    if given.given("attention_factor"):
        scale = given.number("attention_factor")
    elif given.values.get("mscale") and given.values.get("mscale_all_dim"):
        scale = mscale(factor, given.number("mscale")) / mscale(
            factor, given.number("mscale_all_dim")
        )
    else:
        scale = mscale(factor)

    def dimension_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i, base in enumerate(_unscaled(theta, size)):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(base / factor * ramp + base * (1 - ramp))
    return frequencies, scale
