"""The dialect ``ort``: the step with ONNX Runtime's fused attention, norms and products."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from linnet.spec.passes.expand import expand_function
from linnet.spec.program import Function, Node, Program
from linnet.spec.types import DType
from linnet_onnx.fuse import fuse
from linnet_onnx.graph import MICROSOFT, Graph, dims
from linnet_onnx.step import step_function
from linnet_onnx.support import Rotary
from linnet_onnx.weights import Weights
from linnet_onnx.writer import Special, Writer

FUSED = frozenset({"linear", "softmax", "sigmoid", "swiglu", "rms_norm", "gelu"})
OPSET = 23
"""The first with RMSNormalization."""
PADDED = "P"
"""Tokens of a row as they are given; ``S`` of them, the longest row's, are computed."""
KEPT = FUSED | {"attention", "rope", "rope_table"}


@dataclass(frozen=True)
class Step:
    """The graph, and why parts of it are in ONNX's own operators."""

    graph: Graph
    notes: tuple[str, ...]


def write_step(
    program: Program, weights: Weights, dtype: DType, product: Special, *, context: int
) -> Step:
    """The step of a ``step_program``; rotary tables reach ``context`` positions.

    ``product`` is the lowering of ``linear``.
    """
    function, refused = fuse(expand_function(step_function(program), KEPT), dtype)
    function = expand_function(function, FUSED)
    caches = {
        n.attrs[key] for n in function.body if n.op == "cached_attention"
        for key in ("keys", "values")
    }  # fmt: skip
    attention = _Attention(context)
    special = {**SPECIAL, "linear": product, "cached_attention": attention.write}
    writer = _StepWriter(program, weights, dtype, special, OPSET)
    return Step(writer.write(function, caches), refused)


class _StepWriter(Writer):
    """Cuts ``tokens[B, P]`` to the longest row: the attention kernel takes its queries, as many as
    there are, for the last positions in use.
    """

    def inputs(self, function: Function) -> list[ir.Value]:
        """Tokens as cut, starts and lengths."""
        g, i32 = self.graph, ir.DataType.INT32
        tokens, starts, lengths = function.inputs
        batch, size = tokens.type.shape
        padded = g.input(tokens.name, i32, (batch, PADDED))
        others = [g.input(value.name, i32, value.type.shape) for value in (starts, lengths)]
        bounds = (g.constant(0, i32, (1,)), _most(g, others[1]), g.constant(1, i32, (1,)))
        cut = g.op("Slice", [padded, *bounds], i32, (batch, size))
        g.sized(cut)
        return [cut, *others]


def _most(g: Graph, x: ir.Value) -> ir.Value:
    return g.op("ReduceMax", [x], ir.DataType.INT32, (1,), keepdims=1)


class _Attention:
    """``cached_attention``; what all layers share is written once."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._lengths: tuple[ir.Value, ir.Value] | None = None
        self._tables: dict[Rotary, tuple[ir.Value, ir.Value]] = {}

    def write(self, w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
        """One layer's."""
        g, attrs = w.graph, node.attrs
        *parts, starts, lengths = xs
        heads, kv_heads = attrs["heads"], attrs["kv_heads"]
        batch, length = node.outputs[0].type.shape[:2]
        size = int(node.outputs[0].type.shape[3])
        if len(parts) > 1:
            parts = [
                g.reshape(x, (batch, length, math.prod(int(d) for d in dims(x)[2:]))) for x in parts
            ]
        else:
            parts = [*parts, None, None]  # type: ignore[list-item]
        if self._lengths is None:
            self._lengths = _lengths(g, starts, lengths)
        rotary: Rotary | None = attrs["rotary"]
        tables: tuple[ir.Value | None, ...] = ()
        extra: dict[str, int] = {}
        if rotary is not None:
            if rotary not in self._tables:
                self._tables[rotary] = _tables(g, rotary, self._context)
            tables = self._tables[rotary]
            extra["do_rotary"] = 1
        if attrs["window"] is not None:
            extra["local_window_size"] = attrs["window"]
        caches = [w.states[attrs[key]] for key in ("keys", "values")]
        y, keys, values = g.ops(
            "GroupQueryAttention",
            [*parts, *caches, *self._lengths, *tables],
            [
                (parts[0].dtype, (batch, length, heads * size)),
                *((cache.dtype, dims(cache)) for cache in caches),
            ],
            MICROSOFT,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=float(attrs["scale"]),
            **extra,
        )
        w.states[attrs["keys"]], w.states[attrs["values"]] = keys, values
        return [g.reshape(y, node.outputs[0].type.shape)]


def _lengths(g: Graph, starts: ir.Value, lengths: ir.Value) -> tuple[ir.Value, ir.Value]:
    """How many positions of each row are in use, less one; and the most of all rows.

    The kernel takes as many as there are tokens for a prompt's beginning, in every row. What it
    cannot do is several tokens of several rows, of which one goes on: there the sum of the largest
    start and length is more, and it says so.
    """
    i32 = ir.DataType.INT32
    batch = dims(starts)
    used = g.op("Add", [starts, lengths], i32, batch)
    last = g.op("Sub", [used, g.constant(1, i32, ())], i32, batch)
    return last, g.op("Add", [_most(g, starts), _most(g, lengths)], i32, (1,))


def _tables(g: Graph, rotary: Rotary, context: int) -> tuple[ir.Value, ir.Value]:
    """Cosines and sines of every position. A loader folds them; the file holds only frequencies."""
    f32 = ir.DataType.FLOAT
    pairs = len(rotary.frequencies)
    bounds = [g.constant(n, ir.DataType.INT64, ()) for n in (0, context, 1)]
    positions = g.cast(g.op("Range", bounds, ir.DataType.INT64, (context,)), f32)
    column = g.op("Unsqueeze", [positions, g.integers(1)], f32, (context, 1))
    frequencies = g.constant(np.array(rotary.frequencies), f32, (pairs,))
    angles = g.op("Mul", [column, frequencies], f32, (context, pairs))
    tables = [g.op(name, [angles], f32, (context, pairs)) for name in ("Cos", "Sin")]
    if rotary.scale != 1.0:
        scale = g.constant(rotary.scale, f32, ())
        tables = [g.op("Mul", [table, scale], f32, (context, pairs)) for table in tables]
    cos, sin = (g.cast(table, g.kind(DType.FLOAT)) for table in tables)
    return cos, sin


def _skip_norm(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    kind, shape = xs[0].dtype, dims(xs[0])
    norm, _, _, total = w.graph.ops(
        "SkipSimplifiedLayerNormalization",
        xs,
        [(kind, shape), None, None, (kind, shape)],
        MICROSOFT,
        epsilon=float(node.attrs["eps"]),
    )
    return [norm, total]


def _norm(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    eps = float(node.attrs["eps"])
    return [w.graph.op("RMSNormalization", xs, xs[0].dtype, dims(xs[0]), axis=-1, epsilon=eps)]


def _split(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    sizes = w.graph.integers(*(int(v.type.shape[-1]) for v in node.outputs))
    results = [(xs[0].dtype, value.type.shape) for value in node.outputs]
    return w.graph.ops("Split", [xs[0], sizes], results, axis=-1)


def _swiglu(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    gate, up = xs
    shape = dims(gate)
    active = w.graph.op("QuickGelu", [gate], gate.dtype, shape, MICROSOFT, alpha=1.0)
    return [w.graph.op("Mul", [active, up], gate.dtype, shape)]


def linear(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """A product that reads the weight as it is stored, ``[N, K]``."""
    x, weight, *bias = xs
    shape = node.outputs[0].type.shape
    y = w.graph.op("FusedMatMul", [x, weight], x.dtype, shape, MICROSOFT, transB=1)
    return [w.graph.op("Add", [y, bias[0]], x.dtype, shape) if bias else y]


SPECIAL: Mapping[str, Special] = {
    "skip_rms_norm": _skip_norm,
    "rms_norm": _norm,
    "split": _split,
    "swiglu": _swiglu,
}
