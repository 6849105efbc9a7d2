"""A graph under construction: values with types and shapes, nodes in order, named initializers.

Thin over ``onnx_ir``. Knows nothing of programs; sizes may be names, as in ``[B, S, 48]``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from linnet.spec.types import Dim, DType
from linnet.weights.checkpoint import Array

OPSET = 21
"""Old enough for every runtime of today, new enough for bf16 and 4-bit types."""
IR_VERSION = 10
WEIGHTS = "weights"
"""The file that initializers are said to be in, until a loader or the exporter says better."""
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

KINDS = {
    DType.F64: ir.DataType.DOUBLE,
    DType.F32: ir.DataType.FLOAT,
    DType.F16: ir.DataType.FLOAT16,
    DType.BF16: ir.DataType.BFLOAT16,
    DType.I64: ir.DataType.INT64,
    DType.I32: ir.DataType.INT32,
    DType.I16: ir.DataType.INT16,
    DType.I8: ir.DataType.INT8,
    DType.U64: ir.DataType.UINT64,
    DType.U32: ir.DataType.INT64,
    DType.U16: ir.DataType.UINT16,
    DType.U8: ir.DataType.UINT8,
    DType.BOOL: ir.DataType.BOOL,
}
"""ONNX's types for ours. Few runtimes compute in u32, so it is an i64 that is masked."""


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: ``read`` gives its values when they are written or loaded."""

    name: str
    kind: ir.DataType
    shape: tuple[int, ...]
    read: Callable[[], Array] = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.ceil(math.prod(self.shape) * self.kind.bitwidth / 8)

    def lying(self, file: str, offset: int) -> ir.ExternalTensor:
        """The tensor as it lies in a file, from ``offset`` on."""
        shape = ir.Shape(self.shape)
        return ir.ExternalTensor(file, offset, self.nbytes, self.kind, shape=shape, name=self.name)


class Graph:
    """Gathers nodes; every method that makes a value gives it its type and shape."""

    def __init__(self, dtype: DType, opset: int = OPSET) -> None:
        self.dtype, self.opset = dtype, opset
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self._stored: dict[str, Stored] = {}
        self.floats: dict[str, ir.Value] = {}
        """Values in the graph's own dtype, by what and where they are."""
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._initializers: dict[str, ir.Value] = {}
        self._sizes: dict[str, ir.Value] = {}
        self._where: dict[str, tuple[ir.Value, int]] = {}

    def kind(self, dtype: str) -> ir.DataType:
        """The element type for one of the program's; its ``float`` is the graph's dtype."""
        return KINDS[self.dtype if dtype == DType.FLOAT else DType(dtype)]

    def input(self, name: str, kind: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        """An input of the graph; its symbolic sizes are known from now on."""
        value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
        self.inputs.append(value)
        self.sized(value)
        return value

    def sized(self, value: ir.Value) -> None:
        """Symbolic sizes that are not known yet are this value's from now on."""
        for axis, size in enumerate(dims(value)):
            if isinstance(size, str):
                self._where.setdefault(size, (value, axis))

    def output(self, name: str, value: ir.Value) -> None:
        """Give a value out under a name."""
        if value.producer() is None or value in self.outputs:
            value = self.op("Identity", [value], value.dtype, dims(value))
        value.name = name
        self.outputs.append(value)

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        kind: ir.DataType | None,
        shape: Sequence[Dim],
        domain: str = "",
        **attrs: Any,
    ) -> ir.Value:
        """A node with one result."""
        return self.ops(op_type, inputs, [(kind, shape)], domain, **attrs)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        results: Sequence[tuple[ir.DataType | None, Sequence[Dim]] | None],
        domain: str = "",
        **attrs: Any,
    ) -> list[ir.Value]:
        """A node with several results; None is one that is left out."""
        outputs = [
            ir.Value(name="")
            if result is None
            else ir.Value(
                name=f"{op_type.lower()}_{len(self.nodes)}" + (f"_{place}" if place else ""),
                type=ir.TensorType(result[0]) if result[0] is not None else None,
                shape=ir.Shape(result[1]),
            )
            for place, result in enumerate(results)
        ]
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(
            ir.node(op_type, inputs, attrs or None, domain=domain, outputs=outputs, name=name)
        )
        return outputs

    def constant(self, values: Any, kind: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """Literal values; equal ones are one initializer."""
        array = np.asarray(values).astype(kind.numpy()).reshape(shape)
        key = (kind, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._initializer(name, ir.Tensor(array, kind, name=name))
        return self._constants[key]

    def integers(self, *values: int) -> ir.Value:
        """An i64 vector: axes, bounds, shapes."""
        return self.constant(values, ir.DataType.INT64, (len(values),))

    def weight(self, stored: Stored) -> ir.Value:
        """A tensor of the file, once for all that read it."""
        if stored.name not in self._stored:
            self._stored[stored.name] = stored
            # What a loader replaces: values are read when the file is written, or given to it.
            self._initializer(stored.name, stored.lying(WEIGHTS, 0))
        return self._initializers[stored.name]

    @property
    def stored(self) -> list[Stored]:
        """The tensors of the file that something reads."""
        read = self._read()
        return [stored for name, stored in self._stored.items() if name in read]

    def _read(self) -> set[str]:
        return {x.name or "" for node in self._live() for x in node.inputs if x is not None}

    def _live(self) -> list[ir.Node]:
        """The nodes that a result depends on, in order."""
        needed, live = {id(value) for value in self.outputs}, []
        for node in reversed(self.nodes):
            if any(id(value) in needed for value in node.outputs):
                needed.update(id(value) for value in node.inputs)
                live.append(node)
        return live[::-1]

    def _initializer(self, name: str, tensor: ir.Tensor[Any] | ir.ExternalTensor) -> ir.Value:
        value = ir.Value(
            name=name,
            type=ir.TensorType(tensor.dtype),
            shape=tensor.shape,
            const_value=tensor,
        )
        self._initializers[name] = value
        return value

    def size(self, name: str) -> ir.Value:
        """A symbolic size as an i64 vector of one."""
        if name not in self._sizes:
            value, axis = self._where[name]
            self._sizes[name] = self.op(
                "Shape", [value], ir.DataType.INT64, (1,), start=axis, end=axis + 1
            )
        return self._sizes[name]

    def shape(self, shape: Sequence[Dim]) -> ir.Value:
        """A shape as an i64 vector."""
        if all(isinstance(size, int) for size in shape):
            return self.integers(*(size for size in shape if isinstance(size, int)))
        parts = [self.size(s) if isinstance(s, str) else self.integers(s) for s in shape]
        if len(parts) == 1:
            return parts[0]
        return self.op("Concat", parts, ir.DataType.INT64, (len(parts),), axis=0)

    def cast(self, x: ir.Value, kind: ir.DataType) -> ir.Value:
        """Another element type, if it is another."""
        if x.dtype == kind:
            return x
        return self.op("Cast", [x], kind, dims(x), to=int(kind))

    def reshape(self, x: ir.Value, shape: Sequence[Dim]) -> ir.Value:
        """The same values; symbolic sizes are copied from x or inferred where that suffices."""
        old = dims(x)
        producer = x.producer()
        if producer is not None and producer.op_type == "Reshape":
            x = producer.inputs[0] or x
            old = dims(x)
        if tuple(shape) == old:
            return x
        sizes: list[int] = []
        rest = 0
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                sizes.append(size)
            elif axis < len(old) and old[axis] == size:
                sizes.append(0)
            else:
                sizes.append(-1)
                rest += 1
        target = self.integers(*sizes) if rest <= 1 else self.shape(shape)
        return self.op("Reshape", [x, target], x.dtype, shape)

    def model(self, name: str) -> ir.Model:
        """What was gathered, without initializers that nothing reads."""
        read = self._read()
        nodes = self._live()
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=nodes,
            initializers=[v for n, v in self._initializers.items() if n in read],
            name=name,
            opset_imports={"": self.opset}
            | ({MICROSOFT: 1} if any(n.domain == MICROSOFT for n in nodes) else {}),
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="linnet")


def dims(value: ir.Value) -> tuple[Dim, ...]:
    """A value's sizes: numbers and names."""
    assert value.shape is not None, value.name
    return tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
