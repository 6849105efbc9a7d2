"""What each primitive is in StableHLO, as text.

A ``Module`` gathers lines; a lowering adds some and gives the operand that holds its result.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from linnet.spec.composites import NEGATIVE
from linnet.spec.program import Attrs
from linnet.spec.types import DType

KINDS = {"bool": "i1", "u8": "ui8", "u16": "ui16", "u32": "ui32", "u64": "ui64"}
FEW = 4
"""Rows up to which a product is a sum for each, and a cache is written slice by slice."""


@dataclass(frozen=True)
class Operand:
    """A value: its name, its shape, and its element type in MLIR's words."""

    name: str
    shape: tuple[int, ...]
    kind: str

    @property
    def type(self) -> str:
        """``tensor<1x2xf32>``."""
        return tensor(self.shape, self.kind)


def tensor(shape: Sequence[int], kind: str) -> str:
    """``tensor<1x2xf32>``."""
    return f"tensor<{''.join(f'{size}x' for size in shape)}{kind}>"


@dataclass
class Module:
    """Lines of a function's body; ``dtype`` is what the program's ``float`` is."""

    dtype: DType
    platform: str = "cpu"
    ynn: bool = True
    lines: list[str] = field(default_factory=list)
    count: int = 0

    def kind(self, dtype: str) -> str:
        """MLIR's word for an element type."""
        name = str(self.dtype) if dtype == DType.FLOAT else str(dtype)
        return KINDS.get(name, name)

    def add(self, text: str, shape: Sequence[int], kind: str, signature: str = "") -> Operand:
        """A line that makes a value; ``signature`` where the result's type alone is not enough."""
        operand = Operand(f"%{self.count}", tuple(shape), kind)
        self.count += 1
        self.lines.append(f"{operand.name} = {text} : {signature or operand.type}")
        return operand

    def op(self, name: str, inputs: Sequence[Operand], shape: Sequence[int], kind: str) -> Operand:
        """An op whose signature is spelled out."""
        types = ", ".join(x.type for x in inputs)
        names = ", ".join(x.name for x in inputs)
        signature = f"({types}) -> {tensor(shape, kind)}"
        return self.add(f'"stablehlo.{name}"({names})', shape, kind, signature)

    def number(self, value: float, kind: str) -> Operand:
        """A scalar."""
        return self.literal([value], (), kind)

    def literal(self, values: Sequence[float], shape: Sequence[int], kind: str) -> Operand:
        """Literal values in row-major order."""
        texts = [_number(value, kind) for value in values]
        text = texts[0] if len(set(texts)) == 1 else _nested(texts, shape)
        return self.add(f"stablehlo.constant dense<{text}>", shape, kind)

    def spread(
        self, x: Operand, shape: Sequence[int], dims: Sequence[int] | None = None
    ) -> Operand:
        """Broadcast: from the right as NumPy does, or with x's axes at ``dims``."""
        if x.shape == tuple(shape) and dims is None:
            return x
        if dims is None:
            dims = range(len(shape) - len(x.shape), len(shape))
        text = f"stablehlo.broadcast_in_dim {x.name}, dims = [{_list(dims)}]"
        return self.add(text, shape, x.kind, f"({x.type}) -> {tensor(shape, x.kind)}")

    def reshape(self, x: Operand, shape: Sequence[int]) -> Operand:
        """The same values in row-major order."""
        return x if x.shape == tuple(shape) else self.op("reshape", [x], shape, x.kind)

    def convert(self, x: Operand, kind: str) -> Operand:
        """Another element type."""
        return x if x.kind == kind else self.op("convert", [x], x.shape, kind)

    def binary(self, name: str, x: Operand, y: Operand) -> Operand:
        """An elementwise op of two, broadcast."""
        shape = _broadcast(x.shape, y.shape)
        return self.op(name, [self.spread(x, shape), self.spread(y, shape)], shape, x.kind)

    def compare(self, direction: str, x: Operand, y: Operand) -> Operand:
        """A comparison, broadcast."""
        shape = _broadcast(x.shape, y.shape)
        x, y = self.spread(x, shape), self.spread(y, shape)
        signature = f"({x.type}, {y.type}) -> {tensor(shape, 'i1')}"
        text = f"stablehlo.compare {direction}, {x.name}, {y.name}"
        return self.add(text, shape, "i1", signature)

    def select(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        """x where the condition holds, else y, broadcast."""
        shape = _broadcast(condition.shape, _broadcast(x.shape, y.shape))
        parts = [self.spread(part, shape) for part in (condition, x, y)]
        return self.op("select", parts, shape, x.kind)

    def slice(self, x: Operand, starts: Sequence[int], stops: Sequence[int]) -> Operand:
        """A fixed stretch of every axis."""
        shape = [stop - start for start, stop in zip(starts, stops, strict=True)]
        ranges = ", ".join(f"{a}:{b}" for a, b in zip(starts, stops, strict=True))
        signature = f"({x.type}) -> {tensor(shape, x.kind)}"
        return self.add(f"stablehlo.slice {x.name} [{ranges}]", shape, x.kind, signature)

    def transpose(self, x: Operand, axes: Sequence[int]) -> Operand:
        """The axes of x in another order."""
        shape = tuple(x.shape[axis] for axis in axes)
        text = f"stablehlo.transpose {x.name}, dims = [{_list(axes)}]"
        return self.add(text, shape, x.kind, f"({x.type}) -> {tensor(shape, x.kind)}")

    def concat(self, parts: Sequence[Operand], axis: int) -> Operand:
        """One after the other along an axis."""
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        names = ", ".join(part.name for part in parts)
        types = ", ".join(part.type for part in parts)
        signature = f"({types}) -> {tensor(shape, parts[0].kind)}"
        text = f"stablehlo.concatenate {names}, dim = {axis}"
        return self.add(text, shape, parts[0].kind, signature)

    def iota(self, shape: Sequence[int], axis: int, kind: str) -> Operand:
        """0, 1, 2, ... along an axis."""
        return self.add(f"stablehlo.iota dim = {axis}", shape, kind)

    def reduce(self, x: Operand, what: str, axis: int, start: float) -> Operand:
        """A sum or maximum along an axis, which goes."""
        axis %= len(x.shape)
        first = self.number(start, x.kind)
        shape = [size for i, size in enumerate(x.shape) if i != axis]
        text = (
            f"stablehlo.reduce({x.name} init: {first.name}) applies stablehlo.{what} "
            f"across dimensions = [{axis}]"
        )
        return self.add(text, shape, x.kind, f"({x.type}, {first.type}) -> {tensor(shape, x.kind)}")

    def dynamic_slice(self, x: Operand, at: Sequence[Operand], sizes: Sequence[int]) -> Operand:
        """A stretch that starts at scalars."""
        names = ", ".join(index.name for index in at)
        types = ", ".join([x.type, *(index.type for index in at)])
        text = f"stablehlo.dynamic_slice {x.name}, {names}, sizes = [{_list(sizes)}]"
        return self.add(text, sizes, x.kind, f"({types}) -> {tensor(sizes, x.kind)}")

    def bits(self, x: Operand) -> Operand:
        """Floats of two bytes as integers where the platform is a CPU; others as they are."""
        two = self.platform == "cpu" and x.kind in ("bf16", "f16")
        return self.op("bitcast_convert", [x], x.shape, "ui16") if two else x

    def floats(self, x: Operand) -> Operand:
        """What ``bits`` was of."""
        kind = self.kind(DType.FLOAT)
        return self.op("bitcast_convert", [x], x.shape, kind) if x.kind == "ui16" else x

    def barrier(self, x: Operand) -> Operand:
        """x, which XLA does not merge with what is done to it."""
        return self.op("optimization_barrier", [x], x.shape, x.kind)

    def wide(self, x: Operand) -> Operand:
        """What a product is computed in: f32 on a CPU, whose dot has no other that is fast."""
        return self.convert(x, "f32") if self.platform == "cpu" and x.kind != "f64" else x

    def dot(
        self, x: Operand, y: Operand, batch: int, contract: tuple[int, int], shape: Sequence[int]
    ) -> Operand:
        """A product over one axis of each, the first ``batch`` axes matched; summed in f32."""
        x, y, kind = self.wide(x), self.wide(y), "f64" if x.kind == "f64" else "f32"
        same = f"batching_dims = [{_list(range(batch))}] x [{_list(range(batch))}], "
        text = (
            f"stablehlo.dot_general {x.name}, {y.name}, {same * bool(batch)}"
            f"contracting_dims = [{contract[0]}] x [{contract[1]}], "
            "precision = [HIGHEST, HIGHEST]"
        )
        return self.add(text, shape, kind, f"({x.type}, {y.type}) -> {tensor(shape, kind)}")


def _list(values: Sequence[int] | range) -> str:
    return ", ".join(map(str, values))


def _number(value: float, kind: str) -> str:
    if kind == "i1":
        return "true" if value else "false"
    return f"{value:.17e}" if kind in ("f16", "bf16", "f32", "f64") else str(int(value))


def _nested(texts: Sequence[str], shape: Sequence[int]) -> str:
    if len(shape) == 1:
        return f"[{', '.join(texts)}]"
    step = len(texts) // shape[0]
    parts = [_nested(texts[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]
    return f"[{', '.join(parts)}]"


def _broadcast(x: Sequence[int], y: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(x), len(y))
    left, right = (1,) * (rank - len(x)) + tuple(x), (1,) * (rank - len(y)) + tuple(y)
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


# --- ops --------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Lowering = Callable[[Module, Sequence[Operand], Attrs, Shape], Operand]


def lower(
    module: Module, op: str, operands: Sequence[Operand], attrs: Attrs, shape: Shape
) -> Operand:
    """One op; ``shape`` is its result's."""
    if op in UNARY:
        return module.op(UNARY[op], operands, shape, operands[0].kind)
    if op in BINARY:
        return module.binary(BINARY[op], *operands)
    if op in COMPARE:
        return module.compare(COMPARE[op], *operands)
    return SPECIAL[op](module, operands, attrs, shape)


UNARY = {
    "neg": "negate",
    "exp": "exponential",
    "log": "log",
    "rsqrt": "rsqrt",
    "sin": "sine",
    "cos": "cosine",
    "tanh": "tanh",
}
BINARY = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
    "and": "and",
    "xor": "xor",
    "shift_right": "shift_right_logical",
}
COMPARE = {"eq": "EQ", "lt": "LT", "le": "LE"}


def _erf(m: Module, xs: Sequence[Operand], _attrs: Attrs, _shape: Shape) -> Operand:
    """StableHLO has no erf. Abramowitz and Stegun 7.1.26, within 1.5e-7."""
    x = m.convert(xs[0], "f32")
    size = m.op("abs", [x], x.shape, "f32")
    t = m.binary("multiply", size, m.number(0.3275911, "f32"))
    t = m.binary("divide", m.number(1.0, "f32"), m.binary("add", t, m.number(1.0, "f32")))
    total = m.number(1.061405429, "f32")
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = m.binary("add", m.binary("multiply", total, t), m.number(factor, "f32"))
    square = m.op("negate", [m.binary("multiply", x, x)], x.shape, "f32")
    tail = m.binary("multiply", total, t)
    tail = m.binary("multiply", tail, m.op("exponential", [square], x.shape, "f32"))
    sign = m.op("sign", [x], x.shape, "f32")
    y = m.binary("multiply", sign, m.binary("subtract", m.number(1.0, "f32"), tail))
    return m.convert(y, xs[0].kind)


def _slice(m: Module, xs: Sequence[Operand], attrs: Attrs, _shape: Shape) -> Operand:
    axis = attrs["axis"] % len(xs[0].shape)
    starts, stops = [0] * len(xs[0].shape), list(xs[0].shape)
    starts[axis], stops[axis] = attrs["start"], attrs["stop"]
    return m.slice(xs[0], starts, stops)


def _sum(m: Module, xs: Sequence[Operand], attrs: Attrs, shape: Shape) -> Operand:
    return m.reshape(m.reduce(xs[0], "add", attrs["axis"], 0), shape)


def _max(m: Module, xs: Sequence[Operand], attrs: Attrs, shape: Shape) -> Operand:
    lowest = {"f16": -65504.0, "i32": -(2**31)}.get(xs[0].kind, -3.3895313892515355e38)
    return m.reshape(m.reduce(xs[0], "maximum", attrs["axis"], lowest), shape)


def _argmax(m: Module, xs: Sequence[Operand], _attrs: Attrs, shape: Shape) -> Operand:
    """The first of the largest: a maximum, then the lowest index of those that are equal to it."""
    x = xs[0]
    largest = m.reshape(_max(m, xs, {"axis": -1}, shape), (*shape, 1))
    index = m.iota(x.shape, len(shape), "i32")
    there = m.select(m.compare("EQ", x, largest), index, m.number(2**31 - 1, "i32"))
    return m.reduce(there, "minimum", -1, 2**31 - 1)


def _sort(m: Module, xs: Sequence[Operand], _attrs: Attrs, _shape: Shape) -> Operand:
    x, scalar = xs[0], tensor((), xs[0].kind)
    body = (
        f"^bb0(%a: {scalar}, %b: {scalar}): %gt = stablehlo.compare GT, %a, %b : "
        f"({scalar}, {scalar}) -> tensor<i1> stablehlo.return %gt : tensor<i1>"
    )
    text = (
        f'"stablehlo.sort"({x.name}) <{{dimension = {len(x.shape) - 1} : i64, is_stable = true}}> '
        f"({{ {body} }})"
    )
    return m.add(text, x.shape, x.kind, f"({x.type}) -> {x.type}")


def _cumsum(m: Module, xs: Sequence[Operand], _attrs: Attrs, _shape: Shape) -> Operand:
    x, scalar, rank = xs[0], tensor((), xs[0].kind), len(xs[0].shape)
    zero, size = m.number(0, x.kind), xs[0].shape[-1]
    pads = [[0, 0]] * (rank - 1) + [[size - 1, 0]]
    ones, window = _list([1] * rank), _list([1] * (rank - 1) + [size])
    body = (
        f"^bb0(%a: {scalar}, %b: {scalar}): %s = stablehlo.add %a, %b : {scalar} "
        f"stablehlo.return %s : {scalar}"
    )
    text = (
        f'"stablehlo.reduce_window"({x.name}, {zero.name}) <{{base_dilations = array<i64: {ones}>, '
        f"padding = dense<{pads}> : tensor<{rank}x2xi64>, window_dilations = array<i64: {ones}>, "
        f"window_dimensions = array<i64: {window}>, window_strides = array<i64: {ones}>}}> "
        f"({{ {body} }})"
    )
    return m.add(text, x.shape, x.kind, f"({x.type}, {scalar}) -> {x.type}")


def _matmul(m: Module, xs: Sequence[Operand], _attrs: Attrs, shape: Shape) -> Operand:
    """Batch axes that only x has become rows of x, so that y is not repeated for them."""
    x, y = xs
    batch = len(shape) - 2
    shared = batch
    y_batch = (1,) * (batch - len(y.shape) + 2) + y.shape[:-2]
    while shared and y_batch[shared - 1] == 1:
        shared -= 1
    x = m.spread(x, (*shape[:-2], *x.shape[-2:]))
    y = m.reshape(y, (*y_batch[:shared], *y.shape[-2:]))
    y = m.spread(y, (*shape[:shared], *y.shape[-2:]))
    return m.convert(m.dot(x, y, shared, (batch + 1, shared), shape), xs[0].kind)


def _linear(m: Module, xs: Sequence[Operand], _attrs: Attrs, shape: Shape) -> Operand:
    """A dot; few rows of two-byte floats on a CPU are sums of products, which is faster there."""
    x, weight = xs[:2]
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    if m.platform == "cpu" and weight.kind in ("bf16", "f16") and rows <= FEW:
        flat, parts = m.wide(m.reshape(x, (rows, width))), []
        for row in range(rows):
            one = m.reshape(m.slice(flat, (row, 0), (row + 1, width)), (width,))
            parts.append(m.reshape(_total(m, _products(m, one, weight)), (1, weight.shape[0])))
        y = m.reshape(m.concat(parts, 0), shape)
    else:
        y = m.dot(x, weight, 0, (len(x.shape) - 1, 1), shape)
    y = m.convert(y, x.kind)
    return m.binary("add", y, xs[2]) if len(xs) > 2 else y


def _products(m: Module, x: Operand, y: Operand) -> Operand:
    """x f32 times y, to be summed over the last axis: as ``helpers.products`` has it."""
    if m.ynn or y.shape[-1] % 2:
        return m.binary("multiply", x, m.wide(y))
    x = m.reshape(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    y = m.reshape(y, (*y.shape[:-1], y.shape[-1] // 2, 2))
    if y.kind == "bf16":  # two as one word: as bits, a bf16 is the upper half of an f32
        half = y.shape[:-1]
        words = m.op("bitcast_convert", [y], half, "ui32")
        low = m.binary("shift_left", words, m.number(16, "ui32"))
        high = m.binary("and", words, m.number(0xFFFF0000, "ui32"))
        ys = [m.op("bitcast_convert", [bits], half, "f32") for bits in (low, high)]
    else:
        ys = [m.wide(_item(m, y, i)) for i in range(2)]
    return m.binary("add", *(m.binary("multiply", y, _item(m, x, i)) for i, y in enumerate(ys)))


def _item(m: Module, x: Operand, index: int) -> Operand:
    """One of the last axis, which goes."""
    lead = x.shape[:-1]
    one = m.slice(x, (*[0] * len(lead), index), (*lead, index + 1))
    return m.reshape(one, lead)


def _total(m: Module, x: Operand) -> Operand:
    """The sum over the last axis, in blocks where YNN takes none: as ``helpers.total`` has it."""
    while not m.ynn and x.shape[-1] > 32:
        x = m.barrier(m.reduce(_blocks(m, x, -1, 32), "add", -1, 0))
    return m.reduce(x, "add", -1, 0)


def _blocks(m: Module, x: Operand, axis: int, most: int) -> Operand:
    """An axis as two, the second of at most ``most``, or of all of it where nothing divides it."""
    axis %= len(x.shape)
    size = x.shape[axis]
    block = max((d for d in range(2, most + 1) if size % d == 0), default=size)
    return m.reshape(x, (*x.shape[:axis], size // block, block, *x.shape[axis + 1 :]))


def _attention(m: Module, xs: Sequence[Operand], attrs: Attrs, shape: Shape) -> Operand:
    """For few queries: sums, which read caches where they lie, as ``helpers.attend`` has them."""
    q, k, v, positions = xs
    batch, length, heads, size = q.shape
    context, groups, shared = k.shape[1], k.shape[2], heads // k.shape[2]
    x = m.reshape(m.wide(q), (batch, length, groups, shared, size))
    x = m.reshape(m.transpose(x, (0, 2, 3, 1, 4)), (batch, 1, groups, shared * length, size))
    scores = _total(m, _products(m, x, m.reshape(k, (batch, context, groups, 1, size))))
    scores = m.reshape(m.transpose(scores, (0, 2, 3, 1)), (batch, groups, shared, length, context))
    scores = m.convert(m.binary("multiply", scores, m.number(attrs["scale"], scores.kind)), "f32")
    query = m.reshape(positions, (batch, 1, 1, length, 1))
    key = m.iota((context,), 0, "i32")
    visible = m.compare("LE", key, query)
    if attrs.get("window") is not None:
        oldest = m.binary("subtract", query, m.number(attrs["window"], "i32"))
        visible = m.op("and", [visible, m.compare("LT", oldest, key)], visible.shape, "i1")
    scores = m.select(visible, scores, m.number(NEGATIVE, "f32"))
    largest = (*scores.shape[:-1], 1)
    scores = m.binary("subtract", scores, _max(m, [scores], {"axis": -1}, largest))
    p = m.op("exponential", [scores], scores.shape, "f32")
    p = m.binary("divide", p, _sum(m, [p], {"axis": -1}, largest))
    p = m.wide(m.convert(p, q.kind))
    p = m.reshape(p, (batch, groups, shared * length, context))
    p = m.barrier(m.transpose(p, (2, 0, 3, 1)))  # [H / K * S, B, T, K]
    values, parts = m.wide(v), []
    for i in range(shared * length):
        one = m.slice(p, (i, 0, 0, 0), (i + 1, *p.shape[1:]))
        one = m.binary("multiply", m.reshape(one, (batch, context, groups, 1)), values)
        parts.append(m.reduce(_blocks(m, one, 1, 8), "add", 2, 0))
    sums = [m.reduce(m.barrier(part), "add", 1, 0) for part in parts]  # [B, K, D]
    wide = (batch, groups, 1, v.shape[-1])
    y = m.concat([m.reshape(part, wide) for part in sums], 2)
    y = m.reshape(m.convert(y, q.kind), (batch, groups, shared, length, v.shape[-1]))
    return m.reshape(m.transpose(y, (0, 3, 1, 2, 4)), shape)


def _gather(m: Module, xs: Sequence[Operand], attrs: Attrs, shape: Shape) -> Operand:
    x, ids = xs
    axis = attrs["axis"] % len(x.shape)
    lead = [m.iota((*ids.shape, 1), i, "i32") for i in range(axis)]
    at = m.concat([*lead, m.reshape(ids, (*ids.shape, 1))], len(ids.shape))
    return _rows(m, x, at, shape, (1,) * (axis + 1) + x.shape[axis + 1 :])


def _rows(m: Module, x: Operand, at: Operand, shape: Shape, sizes: Shape) -> Operand:
    """Slices of x that start at the index vectors of ``at``; as many first axes collapse."""
    count, ids, kind = at.shape[-1], len(at.shape) - 1, x.kind
    x = m.bits(x)  # XLA's CPU widens floats of two bytes, all of x, to gather from them
    offsets = range(ids, len(shape))
    numbers = (
        f"offset_dims = [{_list(offsets)}], collapsed_slice_dims = [{_list(range(count))}], "
        f"start_index_map = [{_list(range(count))}], index_vector_dim = {ids}"
    )
    text = (
        f'"stablehlo.gather"({x.name}, {at.name}) <{{dimension_numbers = #stablehlo.gather<'
        f"{numbers}>, indices_are_sorted = false, slice_sizes = array<i64: {_list(sizes)}>}}>"
    )
    y = m.add(text, shape, x.kind, f"({x.type}, {at.type}) -> {tensor(shape, x.kind)}")
    return m.floats(y) if y.kind != kind else y


SPECIAL: Mapping[str, Lowering] = {
    "constant": lambda m, xs, attrs, shape: m.literal(
        attrs["values"], shape, m.kind(attrs["dtype"])
    ),
    "iota": lambda m, xs, attrs, shape: m.iota(shape, 0, m.kind(attrs["dtype"])),
    "cast": lambda m, xs, attrs, shape: m.convert(xs[0], m.kind(attrs["dtype"])),
    "where": lambda m, xs, attrs, shape: m.select(*xs),
    "reshape": lambda m, xs, attrs, shape: m.reshape(xs[0], shape),
    "broadcast": lambda m, xs, attrs, shape: m.spread(xs[0], shape),
    "concat": lambda m, xs, attrs, shape: m.concat(xs, attrs["axis"] % len(shape)),
    "transpose": lambda m, xs, attrs, shape: m.transpose(xs[0], attrs["axes"]),
    "slice": _slice,
    "erf": _erf,
    "reduce_sum": _sum,
    "reduce_max": _max,
    "argmax": _argmax,
    "sort": _sort,
    "cumsum": _cumsum,
    "matmul": _matmul,
    "linear": _linear,
    "attention": _attention,
    "gather": _gather,
}


# --- states -----------------------------------------------------------------------------------


def read(m: Module, state: Operand, end: int, rows: Operand | None = None) -> Operand:
    """The first ``end`` positions of the given rows, or of all, as floats."""
    return m.floats(_stretch(m, state, end, rows))


def _stretch(m: Module, state: Operand, end: int, rows: Operand | None) -> Operand:
    rest = state.shape[2:]
    if rows is None:
        return m.slice(state, [0] * len(state.shape), (state.shape[0], end, *rest))
    count = rows.shape[0]
    if count > FEW:
        at = m.reshape(rows, (count, 1))
        return _rows(m, state, at, (count, end, *rest), (1, end, *rest))
    zero = m.number(0, "i32")
    parts = [
        m.dynamic_slice(state, [_item(m, rows, b), *[zero] * (1 + len(rest))], (1, end, *rest))
        for b in range(count)
    ]
    return m.concat(parts, 0)


def write(
    m: Module,
    state: Operand,
    x: Operand,
    starts: Operand,
    lengths: Operand,
    rows: Operand | None = None,
) -> Operand:
    """The state with the first lengths[b] of x from starts[b] on, in row rows[b] or b."""
    if state.kind == "ui16":
        x = m.bits(x)
    if x.shape[0] > FEW:
        return _scatter(m, state, x, starts, lengths, rows)
    size, rest, context = x.shape[1], x.shape[2:], state.shape[1]
    zero, token = m.number(0, "i32"), m.iota((1, size, *[1] * len(rest)), 1, "i32")
    for b in range(x.shape[0]):
        # A slice would be moved where it passes the end, so it starts earlier, and x is shifted.
        start = _item(m, starts, b)
        first = m.binary("maximum", start, zero)
        first = m.binary("minimum", first, m.number(context - size, "i32"))
        row = m.number(b, "i32") if rows is None else _item(m, rows, b)
        at = [row, first, *[zero] * len(rest)]
        one = m.slice(x, (b, *[0] * (1 + len(rest))), (b + 1, size, *rest))
        late = m.binary("subtract", start, first)
        if size > 1:
            empty = m.spread(m.number(0, x.kind), one.shape)
            shifted = m.binary("subtract", m.number(size, "i32"), late)
            where = [zero, shifted, *[zero] * len(rest)]
            one = m.dynamic_slice(m.concat([empty, one], 1), where, one.shape)
        mine = m.binary("subtract", token, late)
        real = m.op(
            "and",
            [m.compare("LE", zero, mine), m.compare("LT", mine, _item(m, lengths, b))],
            token.shape,
            "i1",
        )
        old = m.dynamic_slice(state, at, one.shape)
        state = m.op(
            "dynamic_update_slice", [state, m.select(real, one, old), *at], state.shape, state.kind
        )
    return state


def _scatter(
    m: Module, state: Operand, x: Operand, starts: Operand, lengths: Operand, rows: Operand | None
) -> Operand:
    """Many rows at once: an index beyond the end is not written."""
    batch, size = x.shape[:2]
    token = m.iota((batch, size), 1, "i32")
    real = m.compare("LT", token, m.reshape(lengths, (batch, 1)))
    position = m.binary("add", m.reshape(starts, (batch, 1)), token)
    position = m.select(real, position, m.number(state.shape[1], "i32"))
    rows = m.iota((batch,), 0, "i32") if rows is None else rows
    row = m.spread(m.reshape(rows, (batch, 1)), (batch, size))
    at = m.concat([m.reshape(part, (batch, size, 1)) for part in (row, position)], 2)
    scalar = tensor((), state.kind)
    numbers = (
        f"update_window_dims = [{_list(range(2, len(x.shape)))}], inserted_window_dims = [0, 1], "
        "scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 2"
    )
    text = (
        f'"stablehlo.scatter"({state.name}, {at.name}, {x.name}) <{{indices_are_sorted = false, '
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, unique_indices = false}}> "
        f"({{ ^bb0(%a: {scalar}, %b: {scalar}): stablehlo.return %b : {scalar} }})"
    )
    signature = f"({state.type}, {at.type}, {x.type}) -> {state.type}"
    return m.add(text, state.shape, state.kind, signature)
