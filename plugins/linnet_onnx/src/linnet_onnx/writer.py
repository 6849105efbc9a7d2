"""A program's entries as ONNX graphs, written node by node and never traced.

``write_entry`` is the dialect ``standard``: an entry as the program has it, in ONNX's own
operators. States come in and go out, under names that ``state_names`` gives.
"""

from collections.abc import Callable, Container, Mapping, Sequence

import onnx_ir as ir

from linnet.spec.passes.expand import expand
from linnet.spec.passes.inline import inline_entry
from linnet.spec.program import Function, Node, Program
from linnet.spec.types import DType
from linnet_onnx import ops
from linnet_onnx.graph import OPSET, Graph
from linnet_onnx.weights import Weights

Special = Callable[["Writer", Node, Sequence[ir.Value]], Sequence[ir.Value]]
"""A lowering that needs more than its operands: weights or states."""


def state_names(path: str) -> tuple[str, str]:
    """What a state is called where it comes in and where it goes out."""
    return f"past.{path}", f"present.{path}"


def present_name(past: str) -> str:
    """What a state is called where it goes out, by its name where it comes in."""
    return f"present.{past.removeprefix('past.')}"


def write_entry(program: Program, entry: str, weights: Weights, dtype: DType) -> Graph:
    """One entry in ONNX's own operators."""
    function = inline_entry(expand(program, ops.CLAIMED), entry)
    return Writer(program, weights, dtype).write(function, [])


class Writer:
    """Writes a flat function into a graph."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        dtype: DType,
        special: Mapping[str, Special] | None = None,
        opset: int = OPSET,
    ) -> None:
        self.graph = Graph(dtype, opset)
        self.program, self.weights = program, weights
        self.states: dict[str, ir.Value] = {}
        self._special = special or {}
        self._values: dict[int, ir.Value] = {}
        self._last = ""

    def write(self, function: Function, head_first: Container[str]) -> Graph:
        """The graph; states in ``head_first`` lie as ``[R, heads, T, size]``, the others as the
        program has them.
        """
        g = self.graph
        for value, given in zip(function.inputs, self.inputs(function), strict=True):
            self._values[value.index] = given
        used = {n.attrs[key] for n in function.body for key in STATE_ATTRS if key in n.attrs}
        first = function.inputs[0].type.shape[0]
        for state in self.program.states:
            if state.path in used:
                shape = state.type.shape
                if not any(v.name == "rows" for v in function.inputs):
                    shape = (first, *shape[1:])
                if state.path in head_first:
                    shape = (shape[0], shape[2], shape[1], *shape[3:])
                name = state_names(state.path)[0]
                self.states[state.path] = g.input(name, g.kind(DType.FLOAT), shape)
        for node in function.body:
            self._node(node)
        for name, value in zip(result_names(function), function.outputs, strict=True):
            g.output(name, self._values[value.index])
        for path, state_value in self.states.items():
            g.output(state_names(path)[1], state_value)
        return g

    def inputs(self, function: Function) -> list[ir.Value]:
        """The function's inputs as the graph's."""
        return [
            self.graph.input(value.name, self.graph.kind(value.type.dtype), value.type.shape)
            for value in function.inputs
        ]

    def _node(self, node: Node) -> None:
        xs = [self._values[value.index] for value in node.inputs]
        g = self.graph
        if node.op in self._special:
            results = self._special[node.op](self, node, xs)
        elif node.op == "parameter":
            results = [g.weight(self.weights.plain(node.attrs["path"]))]
        elif node.op == "state_write":
            values, starts, lengths, *rows = xs
            state = self.states[node.attrs["state"]]
            self.states[node.attrs["state"]] = ops.write(
                g, state, values, starts, lengths, rows[0] if rows else None
            )
            results = []
        elif node.op == "state_read":
            state = self.states[node.attrs["state"]]
            results = [ops.read(g, state, xs[0] if xs else None, node.outputs[0].type)]
        else:
            results = [ops.lower(g, node.op, xs, node.attrs, node.outputs[0].type)]
        if node.op == "parameter":
            self._last = node.attrs["path"]
        for value, result in zip(node.outputs, results, strict=True):
            self._values[value.index] = result
            if value.type.dtype is DType.FLOAT and node.op != "parameter":
                g.floats[f"{node.op} after {self._last} ({result.name})"] = result


STATE_ATTRS = ("state", "keys", "values")
"""Attributes of nodes that name a state."""


def result_names(function: Function) -> list[str]:
    """``token`` for what is chosen, ``logits`` for the others."""
    return ["token" if v.type.dtype is DType.I32 else "logits" for v in function.outputs]
