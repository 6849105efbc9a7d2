"""What each primitive is in ONNX's own operators, and the composites that have one.

A lowering gets the graph, the operands, the attributes and the type of its result.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from linnet.spec.program import Attrs
from linnet.spec.types import DType, TensorType
from linnet_onnx.graph import Graph, dims

Lowering = Callable[[Graph, Sequence[ir.Value], Attrs, TensorType], ir.Value]

I64 = ir.DataType.INT64
MASK = 0xFFFFFFFF


def lower(g: Graph, op: str, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    """One op of a program."""
    if op in PLAIN:
        kind = g.kind(result.dtype)
        if result.dtype is DType.U32 and op in ("add", "sub", "mul"):
            return _masked(g, g.op(PLAIN[op], xs, kind, result.shape))
        return g.op(PLAIN[op], xs, kind, result.shape)
    return SPECIAL[op](g, xs, attrs, result)


PLAIN = {
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "tanh": "Tanh",
    "erf": "Erf",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "maximum": "Max",
    "minimum": "Min",
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "and": "And",
    "xor": "BitwiseXor",
    "where": "Where",
    "matmul": "MatMul",
    "sigmoid": "Sigmoid",
}
"""Ops that an operator of ONNX says in full."""


def _masked(g: Graph, x: ir.Value) -> ir.Value:
    """The low 32 bits of an i64 that stands for a u32."""
    return g.op("BitwiseAnd", [x, g.constant(MASK, I64, ())], I64, dims(x))


def _cast(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    y = g.cast(xs[0], g.kind(attrs["dtype"]))
    return _masked(g, y) if result.dtype is DType.U32 else y


def _constant(g: Graph, _xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    shape = [size for size in result.shape if isinstance(size, int)]
    return g.constant(np.array(attrs["values"]), g.kind(attrs["dtype"]), shape)


def _iota(g: Graph, _xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    kind, size = g.kind(attrs["dtype"]), attrs["size"]
    if isinstance(size, int):
        return g.constant(np.arange(size), kind, (size,))
    scalar = g.op("Squeeze", [g.size(size), g.integers(0)], I64, ())
    bounds = (g.constant(0, I64, ()), scalar, g.constant(1, I64, ()))
    return g.cast(g.op("Range", bounds, I64, (size,)), kind)


def _rsqrt(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    root = g.op("Sqrt", xs, xs[0].dtype, result.shape)
    return g.op("Reciprocal", [root], xs[0].dtype, result.shape)


def _shift_right(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    wide = [g.cast(x, ir.DataType.UINT64) for x in xs]
    shifted = g.op("BitShift", wide, ir.DataType.UINT64, result.shape, direction="RIGHT")
    return g.cast(shifted, I64)


def _broadcast(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    if dims(xs[0]) == result.shape:
        return xs[0]
    return g.op("Expand", [xs[0], g.shape(result.shape)], xs[0].dtype, result.shape)


def _transpose(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    return g.op("Transpose", xs, xs[0].dtype, result.shape, perm=list(attrs["axes"]))


def _slice(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    bounds = [g.integers(attrs[name]) for name in ("start", "stop", "axis")]
    return g.op("Slice", [xs[0], *bounds], xs[0].dtype, result.shape)


def _concat(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    return g.op("Concat", xs, xs[0].dtype, result.shape, axis=attrs["axis"])


def _reduce(op_type: str) -> Lowering:
    def lowering(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
        axes = g.integers(attrs["axis"])
        return g.op(op_type, [xs[0], axes], xs[0].dtype, result.shape, keepdims=1)

    return lowering


def _argmax(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    index = g.op("ArgMax", xs, I64, result.shape, axis=-1, keepdims=0)
    return g.cast(index, g.kind(DType.I32))


def _sort(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    last = result.shape[-1]
    count = g.size(last) if isinstance(last, str) else g.integers(last)
    both = [(xs[0].dtype, result.shape), (I64, result.shape)]
    return g.ops("TopK", [xs[0], count], both, axis=-1)[0]


def _cumsum(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    return g.op("CumSum", [xs[0], g.constant(-1, I64, ())], xs[0].dtype, result.shape)


def _gather(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    x, ids = xs
    axis = attrs["axis"] % len(dims(x))
    if axis == 0:
        return g.op("Gather", xs, x.dtype, result.shape, axis=0)
    at = g.op("Unsqueeze", [g.cast(ids, I64), g.integers(-1)], I64, (*dims(ids), 1))
    return g.op("GatherND", [x, at], x.dtype, result.shape, batch_dims=axis)


# --- composites -------------------------------------------------------------------------------


def _linear(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    """Gemm reads the weight as it is stored, but takes matrices alone."""
    *lead, width = dims(xs[0])
    outer = result.shape[-1]
    if len(lead) == 1:
        return g.op("Gemm", xs, xs[0].dtype, result.shape, transB=1)
    flat = g.op("Reshape", [xs[0], g.integers(-1, int(width))], xs[0].dtype, ("rows", width))
    y = g.op("Gemm", [flat, *xs[1:]], xs[0].dtype, ("rows", outer), transB=1)
    return g.op("Reshape", [y, g.shape(result.shape)], xs[0].dtype, result.shape)


def _softmax(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    wide = g.cast(xs[0], ir.DataType.FLOAT)
    y = g.op("Softmax", [wide], ir.DataType.FLOAT, result.shape, axis=-1)
    return g.cast(y, xs[0].dtype or ir.DataType.FLOAT)


def _silu(g: Graph, xs: Sequence[ir.Value], _attrs: Attrs, result: TensorType) -> ir.Value:
    gate = g.op("Sigmoid", xs, xs[0].dtype, result.shape)
    return g.op("Mul", [xs[0], gate], xs[0].dtype, result.shape)


def _gelu(g: Graph, xs: Sequence[ir.Value], attrs: Attrs, result: TensorType) -> ir.Value:
    kind = "tanh" if attrs["tanh"] else "none"
    return g.op("Gelu", xs, xs[0].dtype, result.shape, approximate=kind)


SPECIAL: Mapping[str, Lowering] = {
    "cast": _cast,
    "constant": _constant,
    "iota": _iota,
    "rsqrt": _rsqrt,
    "shift_right": _shift_right,
    "reshape": lambda g, xs, attrs, result: g.reshape(xs[0], result.shape),
    "broadcast": _broadcast,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "argmax": _argmax,
    "sort": _sort,
    "cumsum": _cumsum,
    "gather": _gather,
    "linear": _linear,
    "softmax": _softmax,
    "silu": _silu,
    "gelu": _gelu,
}
CLAIMED = frozenset({"linear", "softmax", "sigmoid", "silu", "gelu"})
"""The composites that have a lowering; the others are written out in primitives."""


# --- states -----------------------------------------------------------------------------------


def read(g: Graph, state: ir.Value, rows: ir.Value | None, result: TensorType) -> ir.Value:
    """The given rows of a cache, or all of it."""
    if rows is None:
        return state
    return g.op("Gather", [state, rows], state.dtype, result.shape, axis=0)


def write(
    g: Graph,
    state: ir.Value,
    values: ir.Value,
    starts: ir.Value,
    lengths: ir.Value,
    rows: ir.Value | None,
) -> ir.Value:
    """The cache with the first lengths[b] of values from starts[b] on, in row rows[b] or b.

    What is beyond a row's length is given the value that is there: its place is taken modulo the
    cache's length, so that it is inside, and no other's as long as S is at most T.
    """
    batch, size, *rest = dims(values)
    context = dims(state)[1]
    token = lower(g, "iota", [], {"size": size, "dtype": "i64"}, TensorType(DType.I64, (size,)))
    one = g.integers(1)

    def column(x: ir.Value) -> ir.Value:
        return g.op("Unsqueeze", [g.cast(x, I64), one], I64, (batch, 1))

    real = g.op("Less", [token, column(lengths)], ir.DataType.BOOL, (batch, size))
    place = g.op("Add", [column(starts), token], I64, (batch, size))
    end = g.size(context) if isinstance(context, str) else g.integers(context)
    place = g.op("Mod", [place, end], I64, (batch, size))
    if rows is None:
        type_ = TensorType(DType.I64, (batch,))
        rows = lower(g, "iota", [], {"size": batch, "dtype": "i64"}, type_)
    row = g.op("Expand", [column(rows), g.shape((batch, size))], I64, (batch, size))
    last = g.integers(2)
    both = [g.op("Unsqueeze", [x, last], I64, (batch, size, 1)) for x in (row, place)]
    at = g.op("Concat", both, I64, (batch, size, 2), axis=-1)
    old = g.op("GatherND", [state, at], state.dtype, (batch, size, *rest))
    wide = g.op(
        "Unsqueeze", [real, g.integers(*range(2, 2 + len(rest)))], ir.DataType.BOOL,
        (batch, size, *[1] * len(rest)),
    )  # fmt: skip
    new = g.op("Where", [wide, values, old], state.dtype, (batch, size, *rest))
    return g.op("ScatterND", [state, at, new], state.dtype, dims(state))
