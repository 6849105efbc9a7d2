"""What a generation request may ask for, checked once, before any work is done.

Knows nothing of models. The options are numbers that the program's ``*_sample`` entries take;
the choice itself is made there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from linnet.errors import RequestError

MAX_SEED = 2**31 - 1
"""Seeds are int32 inputs of the program."""


class SamplingFields(TypedDict, total=False):
    """The fields of ``SamplingOptions`` as keywords, all optional."""

    max_new_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when to stop. The default is greedy, to the end of the context.

    What ``generation_config.json`` recommends is never applied unasked: the same call gives the
    same tokens whatever a checkpoint's author wrote there. The filters apply in the order
    temperature, ``top_k``, ``top_p``, ``min_p``, as in Transformers. Raises RequestError naming
    the field, its value and what is allowed.
    """

    max_new_tokens: int | None = None
    """None: as many as the context has room for."""
    temperature: float = 0.0
    """0 takes the likeliest token, and the four fields that follow have no effect."""
    top_k: int = 0
    """Choose among this many of the likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together reach this probability; 1 is off."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one's; 0 is off."""
    seed: int | None = None
    """The same seed gives the same tokens; None draws one, which the result reports."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    ignore_eos: bool = False
    """Go on after an end-of-text token, to ``max_new_tokens``."""

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _whole("max_new_tokens", self.max_new_tokens, 1, MAX_SEED)
        _number("temperature", self.temperature, 0, 100)
        if 0 < self.temperature < 1e-4:
            raise _invalid("temperature", self.temperature, "0 for greedy, or from 0.0001 to 100")
        _whole("top_k", self.top_k, 0, MAX_SEED)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        stop: Any = self.stop
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise _invalid("stop", self.stop, "a text or a list of texts")
        if "" in stop:
            raise _invalid("stop", self.stop, "texts of at least one character")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "true or false")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0


def sampling_options(given: SamplingFields) -> SamplingOptions:
    """Options from keywords. Raises RequestError for a name that is not one of the fields."""
    known = [field.name for field in fields(SamplingOptions)]
    for name in given:
        if name not in known:
            raise RequestError(f"unknown option {name!r}; the options are {', '.join(known)}")
    return SamplingOptions(**given)  # type: ignore[arg-type]  # a str stop becomes a tuple


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(name, value, f"a whole number from {least} to {most}")


def _number(name: str, value: Any, least: float, most: float, *, above: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not least <= value <= most or (above and value == least):
        bounds = f"above {least}, up to {most}" if above else f"from {least} to {most}"
        raise _invalid(name, value, f"a number {bounds}")


def _invalid(name: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{name} is {value!r}; it must be {allowed}")
