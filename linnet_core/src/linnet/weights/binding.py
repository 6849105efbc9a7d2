"""Binding: every parameter gets exactly one tensor that fits, and every tensor is used."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, Checkpoint


@dataclass(frozen=True)
class BoundParameter:
    """A parameter's values: ``read()`` gives them in the program's own layout and ``dtype``."""

    path: str
    shape: tuple[int, ...]
    dtype: DType
    read: Callable[[], Array] = field(repr=False, compare=False)


@dataclass(frozen=True)
class BoundModel:
    """A program with the checkpoint that fills it.

    ``parameters`` has an entry for every parameter of the program that is not tied; a tied one
    is found under the path it is tied to. ``describe`` is the typed config, for people;
    ``vocab`` and ``max_positions`` are what generation needs to know of it.
    """

    program: Program
    checkpoint: Checkpoint
    parameters: Mapping[str, BoundParameter]
    vocab: int
    max_positions: int | None
    describe: Mapping[str, Any]
    notes: tuple[str, ...] = ()
