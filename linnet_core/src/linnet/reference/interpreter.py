"""Runs a program node by node in NumPy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from linnet.reference.lowering import apply
from linnet.spec.passes.expand import expand
from linnet.spec.program import Function, Node, Program
from linnet.spec.types import Dim, DType
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import numpy_dtype


class Interpreter:
    """A program with its parameters and states.

    ``dtype`` is what the program's ``float`` means: f32, or f64, in which case whatever the
    program keeps in f32 is computed in f64 too: the nearest thing to exact arithmetic.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[str, Array],
        states: Mapping[str, Array],
        dtype: DType,
    ) -> None:
        self.program = expand(program)
        self.parameters = parameters
        self.states = states
        self.dtype = dtype

    def run(self, entry: str, inputs: Sequence[Array]) -> list[Array]:
        """One entry on positional inputs."""
        return self._function(self.program.entries[entry], list(inputs), "")

    def _numpy(self, dtype: str) -> np.dtype[Any]:
        if dtype == DType.FLOAT or (dtype == DType.F32 and self.dtype is DType.F64):
            return numpy_dtype(self.dtype)
        return numpy_dtype(DType(dtype))

    def _function(self, function: Function, inputs: list[Array], prefix: str) -> list[Array]:
        sizes: dict[str, int] = {}
        values: dict[int, Array] = {}
        for value, array in zip(function.inputs, inputs, strict=True):
            _bind(sizes, value.type.shape, array.shape)
            values[value.index] = array
        last_use = {v.index: i for i, node in enumerate(function.body) for v in node.inputs}
        kept = {value.index for value in function.outputs}

        for position, node in enumerate(function.body):
            operands = [values[value.index] for value in node.inputs]
            results = self._node(node, operands, sizes, prefix)
            for value, array in zip(node.outputs, results, strict=True):
                _bind(sizes, value.type.shape, array.shape)
                values[value.index] = array
            for value in node.inputs:
                if last_use[value.index] == position and value.index not in kept:
                    values.pop(value.index, None)
        return [values[value.index] for value in function.outputs]

    def _node(
        self, node: Node, operands: list[Array], sizes: Mapping[str, int], prefix: str
    ) -> list[Array]:
        attrs = node.attrs

        def shape(dims: Sequence[Dim]) -> tuple[int, ...]:
            return tuple(sizes[d] if isinstance(d, str) else d for d in dims)

        match node.op:
            case "call":
                callee = self.program.functions[attrs["function"]]
                return self._function(callee, operands, f"{prefix}{attrs['at']}.")
            case "loop":
                callee = self.program.functions[attrs["function"]]
                for index in range(attrs["start"], attrs["stop"]):
                    carried = self._function(callee, operands, f"{prefix}{attrs['at']}.{index}.")
                    operands = [*carried, *operands[len(carried) :]]
                return operands[: len(node.outputs)]
            case "parameter":
                return [self.parameters[prefix + attrs["path"]]]
            case "state_read":
                state = self.states[prefix + attrs["state"]]
                # A copy: a later write must not change what was read before it.
                return [state[operands[0]] if operands else state.copy()]
            case "state_write":
                _write(self.states[prefix + attrs["state"]], *operands)
                return []
            case "constant":
                literal = np.array(attrs["values"], dtype=self._numpy(attrs["dtype"]))
                return [literal.reshape(attrs["shape"])]
            case "iota":
                return [np.arange(*shape([attrs["size"]]), dtype=self._numpy(attrs["dtype"]))]
            case "cast":
                return [operands[0].astype(self._numpy(attrs["dtype"]))]
            case "reshape":
                return [operands[0].reshape(shape(attrs["shape"]))]
            case "broadcast":
                return [np.broadcast_to(operands[0], shape(attrs["shape"]))]
            case _:
                return [apply(node.op, operands, attrs)]


def _bind(sizes: dict[str, int], dims: Sequence[Dim], shape: tuple[int, ...]) -> None:
    """Learn what the symbolic sizes are; a disagreement is a bug in a lowering."""
    for dim, size in zip(dims, shape, strict=True):
        known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
        if known != size:
            raise AssertionError(f"a size of {dim} should be {known} but is {size}")


def _write(
    state: Array, values: Array, starts: Array, lengths: Array, rows: Array | None = None
) -> None:
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        row = b if rows is None else rows[b]
        state[row, start : start + length] = values[b, :length]
