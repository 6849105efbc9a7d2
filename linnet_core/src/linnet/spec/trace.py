"""Tracing: running a block's Python once, on symbolic tensors, to get functions.

Knows primitives and calls; composites and blocks are built on it.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.errors import SpecError
from linnet.spec.ops import PRIMITIVES, Mismatch
from linnet.spec.passes.roll import roll
from linnet.spec.program import Attrs, Function, Node, Value
from linnet.spec.types import Dim, DType, TensorType

if TYPE_CHECKING:
    from linnet.spec.blocks import Block, Param, State

_SPEC = str(Path(__file__).parent)  # frames in here are ours, not the family's


class Tensor:
    """A symbolic tensor: a value of the function being traced. Arithmetic appends nodes to it."""

    def __init__(self, value: Value, builder: "Builder") -> None:
        self.value = value
        self.builder = builder

    @property
    def type(self) -> TensorType:
        """Dtype and shape."""
        return self.value.type

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.value.type.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Sizes, some of which may be names."""
        return self.value.type.shape

    def __add__(self, other: "Tensor | float") -> "Tensor":
        return apply("add", self, other)

    def __sub__(self, other: "Tensor | float") -> "Tensor":
        return apply("sub", self, other)

    def __mul__(self, other: "Tensor | float") -> "Tensor":
        return apply("mul", self, other)

    def __truediv__(self, other: "Tensor | float") -> "Tensor":
        return apply("div", self, other)

    def __neg__(self) -> "Tensor":
        return apply("neg", self)

    __radd__ = __add__
    __rmul__ = __mul__

    def __bool__(self) -> bool:
        raise SpecError(
            f"a symbolic {self.type} has no truth value; use where() to choose between tensors"
        )


class Builder:
    """One function in the making."""

    def __init__(self, tracer: "Tracer | None", block: str, prefix: str) -> None:
        self.tracer = tracer
        self.block = block
        self.prefix = prefix
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.count = 0
        self.parameters: dict[str, Tensor] = {}

    def value(self, type_: TensorType, name: str = "") -> Value:
        """A new value of this function."""
        value = Value(self.count, type_, name)
        self.count += 1
        return value

    def input(self, type_: TensorType, name: str) -> Tensor:
        """A new input of this function."""
        value = self.value(type_, name)
        self.inputs.append(value)
        return Tensor(value, self)

    def emit(
        self, op: str, inputs: Sequence[Tensor], attrs: Attrs, results: Sequence[TensorType]
    ) -> tuple[Tensor, ...]:
        """Append a node whose result types are known."""
        for tensor in inputs:
            if tensor.builder is not self:
                raise self.error(
                    op, inputs, f"{tensor.type} belongs to another block; pass it as an argument"
                )
        outputs = tuple(self.value(type_) for type_ in results)
        self.nodes.append(Node(op, tuple(t.value for t in inputs), outputs, dict(attrs), _where()))
        return tuple(Tensor(value, self) for value in outputs)

    def error(self, op: str, inputs: Sequence[Tensor], complaint: str) -> SpecError:
        """A SpecError that names the block, the op, its input types and the family's line."""
        shapes = ", ".join(str(t.type) for t in inputs)
        at = f" at {self.prefix}" if self.prefix else ""
        return SpecError(f"{self.block}{at}: {op}({shapes}): {complaint} ({_where()})")

    def local(self, full: str) -> str:
        """A full path as seen from this function's block."""
        if not self.prefix:
            return full
        if not full.startswith(self.prefix + "."):
            raise SpecError(f"{self.block} at {self.prefix} uses {full}, which is not inside it")
        return full[len(self.prefix) + 1 :]

    def finish(self, name: str, outputs: Sequence[Tensor]) -> Function:
        """The function, with runs of calls to alike layers rolled into loops."""
        body = roll(tuple(self.nodes), tuple(t.value for t in outputs))
        return Function(name, tuple(self.inputs), body, tuple(t.value for t in outputs))


class Tracer:
    """Traces the entries of one block tree, sharing equal functions."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.functions: dict[str, Function] = {}
        self.entry = ""

    def path(self, thing: "Block | Param | State") -> str:
        """Where a block, parameter or state of the tree sits."""
        try:
            return self.paths[id(thing)]
        except KeyError:
            raise SpecError(
                f"{type(thing).__name__} is not an attribute of the model; "
                "blocks, parameters and states are made in __init__, not in the call"
            ) from None

    def intern(self, block: str, function: Function) -> str:
        """The name of an equal function already there, or a new one: block, block_entry, ..."""
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", block).lower()
        for name in _names(base, self.entry):
            known = self.functions.get(name)
            if known is None:
                self.functions[name] = Function(
                    name, function.inputs, function.body, function.outputs
                )
                return name
            if (known.inputs, known.body, known.outputs) == (
                function.inputs,
                function.body,
                function.outputs,
            ):
                return name
        raise AssertionError("unreachable: names do not run out")


def _names(base: str, entry: str) -> Iterator[str]:
    yield base
    yield f"{base}_{entry}"
    number = 2
    while True:
        yield f"{base}_{entry}_{number}"
        number += 1


_stack: list[Builder] = []


def current() -> Builder:
    """The builder of the function being traced."""
    if not _stack:
        raise SpecError("ops build programs: call them inside a block, or use trace_function()")
    return _stack[-1]


@contextmanager
def building(builder: Builder) -> Iterator[Builder]:
    """Make ``builder`` the current one."""
    _stack.append(builder)
    try:
        yield builder
    finally:
        _stack.pop()


def apply(op: str, *operands: "Tensor | float", **attrs: Any) -> Tensor:
    """Append a primitive that has a result; numbers become constants of the tensors' dtype."""
    (result,) = perform(op, *operands, **attrs)
    return result


def perform(op: str, *operands: "Tensor | float", **attrs: Any) -> tuple[Tensor, ...]:
    """Append a primitive; its results, which an op that only writes a state has none of."""
    builder = current()
    inputs = as_tensors(op, operands)
    try:
        results = PRIMITIVES[op].infer(tuple(t.type for t in inputs), attrs)
    except Mismatch as complaint:
        raise builder.error(op, inputs, str(complaint)) from None
    return builder.emit(op, inputs, attrs, results)


def as_tensors(op: str, operands: Sequence[Any]) -> list[Tensor]:
    """Tensors for operands that may be numbers."""
    builder = current()
    tensors = list(operands)
    dtype = next((t.dtype for t in tensors if isinstance(t, Tensor) and t.dtype != "bool"), None)
    for index, operand in enumerate(tensors):
        if isinstance(operand, int | float) and not isinstance(operand, bool) and dtype is not None:
            number = float(operand) if dtype.is_float else int(operand)
            (tensors[index],) = builder.emit(
                "constant",
                (),
                {"values": (number,), "dtype": str(dtype), "shape": ()},
                [TensorType(dtype, ())],
            )
        elif not isinstance(operand, Tensor):
            raise SpecError(
                f"{builder.block}: {op} takes tensors and numbers, not {operand!r} ({_where()})"
            )
    return tensors


def read(param: "Param") -> Tensor:
    """A parameter's value in the function being traced; one node however often it is read."""
    builder = current()
    if builder.tracer is None:
        raise SpecError("a parameter can only be read by a block of the model that owns it")
    path = builder.local(builder.tracer.path(param))
    if path not in builder.parameters:
        (builder.parameters[path],) = builder.emit(
            "parameter",
            (),
            {"path": path, "shape": param.shape},
            [TensorType(DType.FLOAT, param.shape)],
        )
    return builder.parameters[path]


def _where() -> str:
    """File and line of the nearest caller outside the spec."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SPEC):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
