"""Tracing: running a block's Python once, on symbolic tensors, to get functions.

Knows primitives and calls; composites and blocks are built on it.
"""

import dataclasses
import itertools
import keyword
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.errors import SpecError
from linnet.spec.attrs import Mismatch
from linnet.spec.ops import infer
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

    def __rsub__(self, other: float) -> "Tensor":
        return apply("sub", other, self)

    def __rtruediv__(self, other: float) -> "Tensor":
        return apply("div", other, self)

    # Python would answer both without looking at values, which are not known while tracing.

    def __bool__(self) -> bool:
        raise self.builder.complain(
            f"a symbolic {self.type} has no truth value; use where() to choose between tensors"
        )

    def __eq__(self, other: object) -> bool:
        raise self.builder.complain(
            f'a symbolic {self.type} cannot be compared with ==; use apply("eq", x, y)'
        )

    __hash__ = object.__hash__


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
        # The body of a composite is shared by all who call it: it has no line of its own.
        where = _where() if self.tracer else ""
        self.nodes.append(Node(op, tuple(t.value for t in inputs), outputs, dict(attrs), where))
        return tuple(Tensor(value, self) for value in outputs)

    def complain(self, complaint: str) -> SpecError:
        """A SpecError that names the block and the family's line."""
        at = f" at {self.prefix}" if self.prefix else ""
        where = f" ({_where()})" if self.tracer else ""
        return SpecError(f"{self.block}{at}: {complaint}{where}")

    def error(self, op: str, inputs: Sequence[Tensor], complaint: str) -> SpecError:
        """A SpecError that names the block, the op, its input types and the family's line."""
        return self.complain(f"{op}({', '.join(str(t.type) for t in inputs)}): {complaint}")

    def local(self, full: str) -> str:
        """A full path as seen from this function's block."""
        if not self.prefix:
            return full
        if not full.startswith(self.prefix + "."):
            raise self.complain(f"uses {full}, which is not inside it")
        return full[len(self.prefix) + 1 :]

    def finish(self, name: str, outputs: Sequence[Any]) -> Function:
        """The function, with runs of calls to alike layers rolled into loops."""
        for output in outputs:
            if not isinstance(output, Tensor):
                raise self.complain(f"returns {output!r}, not a tensor or a tuple of tensors")
            if output.builder is not self:
                raise self.complain(
                    f"returns {output.type} of another block: pass it as an argument"
                )
        body = roll(tuple(self.nodes), tuple(t.value for t in outputs))
        return Function(name, tuple(self.inputs), body, tuple(t.value for t in outputs))


class Tracer:
    """Traces the entries of one block tree, sharing equal functions."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.functions: dict[str, Function] = {}
        self.alike: dict[str, list[str]] = {}
        self.entry = ""

    def path(self, thing: "Block | Param | State") -> str:
        """Where a block, parameter or state of the tree sits."""
        try:
            return self.paths[id(thing)]
        except KeyError:
            raise current().complain(
                f"uses a {type(thing).__name__} that is not an attribute of the model; "
                "blocks, parameters and states are made in __init__, not in the call"
            ) from None

    def intern(self, block: str, function: Function) -> str:
        """The name of an equal function already there, or a new one: block, block_entry, ..."""
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", block).lower()
        base += "_" if keyword.iskeyword(base) else ""
        alike = self.alike.setdefault(base, [])
        for name in alike:
            if dataclasses.replace(function, name=name) == self.functions[name]:
                return name
        numbered = (f"{base}_{self.entry}_{number}" for number in itertools.count(2))
        names = itertools.chain((base, f"{base}_{self.entry}"), numbered)
        name = next(name for name in names if name not in self.functions)
        self.functions[name] = dataclasses.replace(function, name=name)
        alike.append(name)
        return name


_current: ContextVar["Builder | None"] = ContextVar("_current", default=None)


def current() -> Builder:
    """The builder of the function being traced."""
    builder = _current.get()
    if builder is None:
        raise SpecError("ops build programs: call them in a block that trace_decoder() is tracing")
    return builder


@contextmanager
def building(builder: Builder) -> Iterator[Builder]:
    """Make ``builder`` the current one."""
    token = _current.set(builder)
    try:
        yield builder
    finally:
        _current.reset(token)


def apply(op: str, *operands: "Tensor | float", **attrs: Any) -> Tensor:
    """Append a primitive that has a result; numbers become constants of the tensors' dtype."""
    (result,) = perform(op, *operands, **attrs)
    return result


def perform(op: str, *operands: "Tensor | float", **attrs: Any) -> tuple[Tensor, ...]:
    """Append a primitive; its results, which an op that only writes a state has none of."""
    builder = current()
    inputs = as_tensors(op, operands)
    try:
        results = infer(op, tuple(t.type for t in inputs), attrs)
    except Mismatch as complaint:
        raise builder.error(op, inputs, str(complaint)) from None
    return builder.emit(op, inputs, attrs, results)


def as_tensors(op: str, operands: Sequence[Any]) -> list[Tensor]:
    """Tensors for operands that may be numbers, which take the dtype of the tensors."""
    builder = current()
    dtypes = [t.dtype for t in operands if isinstance(t, Tensor) and t.dtype is not DType.BOOL]

    def tensor(operand: Any) -> Tensor:
        if isinstance(operand, Tensor):
            return operand
        if not isinstance(operand, int | float) or isinstance(operand, bool) or not dtypes:
            raise builder.complain(f"{op} takes tensors, and numbers beside them, not {operand!r}")
        dtype = dtypes[0]
        number = float(operand) if dtype.is_float else operand
        attrs = {"values": (number,), "dtype": str(dtype), "shape": ()}
        try:
            types = infer("constant", (), attrs)
        except Mismatch as complaint:
            raise builder.complain(f"{op}: {complaint}") from None
        return builder.emit("constant", (), attrs, types)[0]

    return [tensor(operand) for operand in operands]


def read(param: "Param") -> Tensor:
    """A parameter's value in the function being traced; one node however often it is read."""
    builder = current()
    if builder.tracer is None:
        raise builder.complain("reads a parameter; only a block of the model can")
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
