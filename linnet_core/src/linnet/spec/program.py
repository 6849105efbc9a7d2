"""A program as data: functions, the calls between them, parameters, states, entries.

Everything here is immutable and knows nothing of how it was traced or how it will run.

A function's parameters and states are named by paths local to its block (``q_proj.weight``); a
call says where that block sits (``at="self_attn"``), so the full path is the one prefix after
the other. Two layers that do the same thing are therefore one function called twice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from linnet.spec.types import Dim, DType, TensorType

Attrs = Mapping[str, Any]
"""An op's attributes: numbers, strings, booleans, None, and tuples of these."""


@dataclass(frozen=True)
class Value:
    """A tensor inside one function. ``name`` is a hint for readers and does not affect meaning."""

    index: int
    type: TensorType
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Node:
    """One op applied to values; ``where`` is the line of the family that wrote it."""

    op: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Attrs = field(default_factory=dict)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Function:
    """Values in, nodes in order, values out. State reads and writes happen in that order."""

    name: str
    inputs: tuple[Value, ...]
    body: tuple[Node, ...]
    outputs: tuple[Value, ...]

    @property
    def next_index(self) -> int:
        """The lowest index above those of its values."""
        made = (value for node in self.body for value in node.outputs)
        return max((value.index + 1 for value in (*self.inputs, *made)), default=0)


@dataclass(frozen=True)
class Parameter:
    """A tensor that a checkpoint supplies.

    ``path`` is its name in a Transformers checkpoint of the family, too. ``role`` says how it is
    used (``linear``, ``embedding``, ``scale``, ``bias``), so that formats know how to encode it.
    ``tied_to`` names the parameter it shares its values with; only the other one is stored.
    ``parts``, which only a pass sets, names the checkpoint's tensors that it holds one after the
    other along the first axis.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    tied_to: str | None = None
    parts: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The checkpoint's tensors that hold its values: its parts, or the one of its path."""
        return self.parts or (self.path,)


@dataclass(frozen=True)
class State:
    """A tensor that lives between calls, owned by the session: ``[R, T, heads, head_dim]``.

    The first axis is the cache row, the second the position. It starts as zeros.
    """

    path: str
    type: TensorType


@dataclass(frozen=True)
class Program:
    """A model: what it computes (``entries``, ``functions``) and what it needs to do so."""

    family: str
    parameters: tuple[Parameter, ...]
    states: tuple[State, ...]
    functions: Mapping[str, Function]
    entries: Mapping[str, Function]

    def parameter(self, path: str) -> Parameter:
        """The parameter at ``path``, or KeyError."""
        for parameter in self.parameters:
            if parameter.path == path:
                return parameter
        raise KeyError(path)

    def all_functions(self) -> Iterator[Function]:
        """Every function, callees before their callers, then every entry."""
        yield from self.functions.values()
        yield from self.entries.values()

    @property
    def parameter_count(self) -> int:
        """How many numbers a checkpoint stores: tied parameters count once."""
        total = 0
        for parameter in self.parameters:
            if parameter.tied_to is None:
                size = 1
                for extent in parameter.shape:
                    size *= extent
                total += size
        return total


ROWS: Dim = "R"
"""How many cache rows a session has."""
CONTEXT: Dim = "T"
"""How many positions a cache row holds."""

__all__ = [
    "CONTEXT",
    "ROWS",
    "Attrs",
    "DType",
    "Function",
    "Node",
    "Parameter",
    "Program",
    "State",
    "TensorType",
    "Value",
]
