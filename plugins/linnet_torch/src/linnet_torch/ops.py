"""How each op is written in PyTorch: a table, one line for most.

A rule gets the node and its operands as expressions and gives an expression. It knows nothing of
variables, statements or layout. Integers of 32 bits may be held in wider ones: u32 is int64,
masked after what may leave its range.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from linnet.errors import UnavailableError
from linnet.spec.program import Node, Value
from linnet.spec.types import Dim, DType

ATOM, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, COMPARE = 9, 8, 7, 6, 5, 4, 3, 1
"""How tightly Python binds, tightest first."""

MASK = "0xFFFFFFFF"

TORCH_DTYPES = {
    DType.F64: "torch.float64",
    DType.F32: "torch.float32",
    DType.F16: "torch.float16",
    DType.BF16: "torch.bfloat16",
    DType.I64: "torch.int64",
    DType.I32: "torch.int32",
    DType.I16: "torch.int16",
    DType.I8: "torch.int8",
    DType.U8: "torch.uint8",
    DType.U32: "torch.int64",
    DType.BOOL: "torch.bool",
}
CAST_METHODS = {DType.F32: "float", DType.I32: "int", DType.I64: "long", DType.BOOL: "bool"}

CLAIMED = (
    "linear",
    "embedding",
    "rms_norm",
    "layer_norm",
    "softmax",
    "sigmoid",
    "silu",
    "gelu",
    "swiglu",
    "rope_table",
    "rope",
    "attention",
    "greedy",
    "gumbel",
    "sample",
)
"""The composites that PyTorch has, or that read better whole."""


@dataclass(frozen=True)
class Expr:
    """Python text that gives a value; ``number`` is a literal, which is no tensor."""

    text: str
    level: int = ATOM
    number: bool = False

    def at(self, level: int) -> str:
        """The text, in brackets if it binds less tightly than its surroundings need."""
        return self.text if self.level >= level else f"({self.text})"


class Context(Protocol):
    """What a rule may ask of the function that is being written."""

    def dims(self, shape: Sequence[Dim]) -> str:
        """``B, S, 6, 16``; the names will be bound."""

    def device(self) -> str:
        """The device, off some tensor at hand."""

    def dtype(self, dtype: DType) -> str:
        """A torch dtype; the run's own off some tensor at hand."""

    def helper(self, name: str) -> str:
        """The name of a helper, which the file will have."""

    def literal(self, node: Node) -> str:
        """The name of a module constant that holds a node's long tuple of values."""


Rule = Callable[[Context, Node, list[Expr]], Expr]


def as_tensor(c: Context, value: Value, operand: Expr) -> str:
    """An operand that must be a tensor, to be called a method of."""
    if not operand.number:
        return operand.at(ATOM)
    return f"torch.tensor({operand.text}, dtype={c.dtype(value.type.dtype)}, device={c.device()})"


def write_op(c: Context, node: Node, operands: list[Expr], special: Mapping[str, Rule]) -> Expr:
    """One node as an expression, by a special rule for its op or the usual one.

    Raises UnavailableError for an op that has no rule.
    """
    rule = special.get(node.op) or RULES.get(node.op)
    if rule is None:
        raise UnavailableError(f"the torch backend does not know the op {node.op!r}")
    return rule(c, node, operands)


# --- kinds of rules ---------------------------------------------------------------------------


def call(name: str, *arguments: str) -> Expr:
    """``name(a, b)``."""
    return Expr(f"{name}({', '.join(arguments)})")


def _method(name: str, *arguments: str) -> Rule:
    def rule(c: Context, node: Node, operands: list[Expr]) -> Expr:
        return call(f"{as_tensor(c, node.inputs[0], operands[0])}.{name}", *arguments)

    return rule


def _infix(symbol: str, level: int) -> Rule:
    def rule(c: Context, node: Node, operands: list[Expr]) -> Expr:
        left, right = operands
        if left.number and right.number:
            left = Expr(as_tensor(c, node.inputs[0], left))
        if level == COMPARE and left.number:  # x >= 0 rather than 0 <= x
            mirrored = symbol.replace("<", ">")
            return Expr(f"{right.at(level + 1)} {mirrored} {left.text}", level)
        if level in (AND, XOR, SHIFT):  # few people know how these bind
            return Expr(f"{left.at(UNARY)} {symbol} {right.at(UNARY)}", level)
        # A chain of comparisons would mean something else, so both sides bind tighter.
        first = left.at(level + (level == COMPARE))
        text = Expr(f"{first} {symbol} {right.at(level + 1)}", level)
        wraps = level in (SUM, PRODUCT) and node.outputs[0].type.dtype is DType.U32
        return Expr(f"({text.text}) & {MASK}", AND) if wraps else text

    return rule


def _function(name: str, *arguments: str) -> Rule:
    def rule(_: Context, __: Node, operands: list[Expr]) -> Expr:
        return call(name, *(operand.text for operand in operands), *arguments)

    return rule


def _helper(name: str, *attrs: str) -> Rule:
    """A helper with some of the node's attributes as keywords."""

    def rule(c: Context, node: Node, operands: list[Expr]) -> Expr:
        keywords = [f"{attr}={node.attrs[attr]!r}" for attr in attrs]
        return call(c.helper(name), *(operand.text for operand in operands), *keywords)

    return rule


def _clamp(bound: str) -> Rule:
    """``maximum`` and ``minimum``, by a number or another tensor."""

    def rule(c: Context, node: Node, operands: list[Expr]) -> Expr:
        (x, other), (value, _) = operands, node.inputs
        if x.number:
            (other, x), (_, value) = operands, node.inputs
        if other.number:
            return call(f"{as_tensor(c, value, x)}.clamp", f"{bound}={other.text}")
        return call("torch.maximum" if bound == "min" else "torch.minimum", x.text, other.text)

    return rule


# --- primitives -------------------------------------------------------------------------------


def _constant(c: Context, node: Node, _: list[Expr]) -> Expr:
    values, dtype, shape = node.attrs["values"], DType(node.attrs["dtype"]), node.attrs["shape"]
    if shape == ():
        number = repr(values[0]).replace("e+", "e")
        if dtype is DType.U32 and values[0] > 0xFFFF:
            number = f"0x{values[0]:08X}"
        if "inf" in number or "nan" in number:
            number = f'float("{number}")'
        return Expr(number, UNARY if number.startswith("-") else ATOM, number=True)
    made = call(c.helper("constant"), c.literal(node), c.dtype(dtype), c.device())
    return made if len(shape) == 1 else call(f"{made.text}.reshape", c.dims(shape))


def _iota(c: Context, node: Node, _: list[Expr]) -> Expr:
    size, dtype = node.attrs["size"], DType(node.attrs["dtype"])
    arguments = [c.dims([size]), f"device={c.device()}"]
    if dtype not in (DType.I32, DType.I64, DType.U32):
        arguments.insert(1, f"dtype={c.dtype(dtype)}")
    return call("torch.arange", *arguments)


def _cast(c: Context, node: Node, operands: list[Expr]) -> Expr:
    dtype = DType(node.attrs["dtype"])
    x = as_tensor(c, node.inputs[0], operands[0])
    if len(operands) == 2:  # the run's dtype, handed in
        return call(f"{x}.to", operands[1].text)
    if dtype is DType.U32:
        return Expr(f"{x}.long() & {MASK}", AND)
    if dtype in CAST_METHODS:
        return call(f"{x}.{CAST_METHODS[dtype]}")
    return call(f"{x}.to", c.dtype(dtype))


def _where(c: Context, node: Node, operands: list[Expr]) -> Expr:
    chosen = call("torch.where", *(operand.text for operand in operands))
    dtype = node.outputs[0].type.dtype
    literal = operands[1].number and operands[2].number
    if literal and dtype.is_float and dtype is not DType.F32:
        return call(f"{chosen.text}.to", c.dtype(dtype))
    return chosen


def _reshape(c: Context, node: Node, operands: list[Expr]) -> Expr:
    old, new = node.inputs[0].type.shape, tuple(node.attrs["shape"])
    x = as_tensor(c, node.inputs[0], operands[0])
    for axis in range(len(new)):
        if (*new[:axis], 1, *old[axis:]) == new and len(new) == len(old) + 1:
            return call(f"{x}.unsqueeze", str(axis))
    for axis in range(len(old)):
        if (*old[:axis], 1, *new[axis:]) == old and len(old) == len(new) + 1:
            return call(f"{x}.squeeze", str(axis))
    return call(f"{x}.reshape", c.dims(new))


def _broadcast(c: Context, node: Node, operands: list[Expr]) -> Expr:
    x = as_tensor(c, node.inputs[0], operands[0])
    return call(f"{x}.expand", c.dims(node.attrs["shape"]))


def _transpose(c: Context, node: Node, operands: list[Expr]) -> Expr:
    axes, x = node.attrs["axes"], as_tensor(c, node.inputs[0], operands[0])
    moved = [axis for axis, source in enumerate(axes) if axis != source]
    if axes == (1, 0):
        return Expr(f"{x}.T")
    if len(moved) == 2:
        return call(f"{x}.transpose", *map(str, moved))
    return call(f"{x}.permute", *map(str, axes))


def _slice(_: Context, node: Node, operands: list[Expr]) -> Expr:
    axis, start, stop = (node.attrs[name] for name in ("axis", "start", "stop"))
    rank, size = node.inputs[0].type.rank, node.inputs[0].type.shape[axis]
    part = f"{start or ''}:{'' if stop == size else stop}"
    axis %= rank
    place = f"..., {part}" if axis == rank - 1 else f"{':, ' * axis}{part}"
    return Expr(f"{operands[0].at(ATOM)}[{place}]")


def _concat(c: Context, node: Node, operands: list[Expr]) -> Expr:
    parts = [
        as_tensor(c, value, operand) if operand.number else operand.text
        for value, operand in zip(node.inputs, operands, strict=True)
    ]
    joined = f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return call("torch.cat", joined, f"dim={node.attrs['axis']}")


def _gather(c: Context, node: Node, operands: list[Expr]) -> Expr:
    x, ids = operands
    axis = node.attrs["axis"] % node.inputs[0].type.rank
    if axis == 0:
        return Expr(f"{x.at(ATOM)}[{ids.text}]")
    if axis == 1 and node.inputs[1].type.rank == 1:
        size = c.dims(node.inputs[1].type.shape)
        return Expr(f"{x.at(ATOM)}[torch.arange({size}, device={c.device()}), {ids.text}]")
    return call(c.helper("take"), x.text, ids.text, f"axis={axis}")


def _reduce(name: str) -> Rule:
    def rule(c: Context, node: Node, operands: list[Expr]) -> Expr:
        x = as_tensor(c, node.inputs[0], operands[0])
        return call(f"{x}.{name}", f"dim={node.attrs['axis']}", "keepdim=True")

    return rule


# --- composites and our own ops ---------------------------------------------------------------


def _rms_norm(_: Context, node: Node, operands: list[Expr]) -> Expr:
    x, scale = operands
    size = node.inputs[0].type.shape[-1]
    return call("F.rms_norm", x.text, f"({size},)", scale.text, f"eps={node.attrs['eps']!r}")


def _swiglu(_: Context, __: Node, operands: list[Expr]) -> Expr:
    return Expr(f"F.silu({operands[0].text}) * {operands[1].at(PRODUCT + 1)}", PRODUCT)


def _gelu(_: Context, node: Node, operands: list[Expr]) -> Expr:
    return call("F.gelu", operands[0].text, *(['approximate="tanh"'] if node.attrs["tanh"] else []))


def _softmax(c: Context, node: Node, operands: list[Expr]) -> Expr:
    dtype = node.inputs[0].type.dtype
    if dtype is DType.F32:
        return call("F.softmax", operands[0].text, "dim=-1")
    wide = call("F.softmax", operands[0].text, "dim=-1", "dtype=torch.float32")
    return call(f"{wide.text}.to", c.dtype(dtype))


def _rope_table(c: Context, node: Node, operands: list[Expr]) -> Expr:
    factor = node.attrs.get("scale", 1.0)
    scale = [] if factor == 1.0 else [f"scale={factor!r}"]
    return call(c.helper("rope_table"), operands[0].text, c.literal(node), *scale)


def _slots(c: Context, node: Node, operands: list[Expr]) -> Expr:
    starts, lengths, end, *rows = (operand.text for operand in operands)
    arguments = [starts, lengths, c.dims([node.attrs["size"]]), *(rows or ["slice(None)"])]
    if node.attrs.get("start"):
        arguments.append("start=start")
    return call(c.helper("cache_slots"), *arguments, f"end={end}")


def _visible(c: Context, node: Node, operands: list[Expr]) -> Expr:
    arguments = [operands[0].text]
    start, window = node.attrs.get("start"), node.attrs["window"]
    if start:
        arguments.append(f"start={start}")
    end = operands[1].text if len(operands) > 1 else c.dims([node.attrs["context"]])
    arguments.append(f"end={end}")
    if window is not None:
        arguments.append(f"window={window}")
    return call(c.helper("visible_keys"), *arguments)


RULES: dict[str, Rule] = {
    "constant": _constant,
    "iota": _iota,
    "cast": _cast,
    "neg": lambda _, __, operands: Expr(f"-{operands[0].at(UNARY)}", UNARY),
    **{name: _method(name) for name in ("exp", "log", "rsqrt", "sin", "cos", "tanh", "erf")},
    "add": _infix("+", SUM),
    "sub": _infix("-", SUM),
    "mul": _infix("*", PRODUCT),
    "div": _infix("/", PRODUCT),
    "maximum": _clamp("min"),
    "minimum": _clamp("max"),
    "eq": _infix("==", COMPARE),
    "lt": _infix("<", COMPARE),
    "le": _infix("<=", COMPARE),
    "and": _infix("&", AND),
    "xor": _infix("^", XOR),
    "shift_right": _infix(">>", SHIFT),
    "where": _where,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
    "reduce_sum": _reduce("sum"),
    "reduce_max": _reduce("amax"),
    "argmax": lambda _, __, x: Expr(f"{x[0].at(ATOM)}.argmax(dim=-1).int()"),
    "sort": lambda _, __, x: Expr(f"{x[0].at(ATOM)}.sort(dim=-1, descending=True).values"),
    "cumsum": _method("cumsum", "dim=-1"),
    "matmul": lambda _, __, x: Expr(f"{x[0].at(PRODUCT)} @ {x[1].at(PRODUCT + 1)}", PRODUCT),
    "gather": _gather,
    "linear": _helper("linear"),
    "embedding": _function("F.embedding"),
    "rms_norm": _rms_norm,
    "layer_norm": _helper("layer_norm", "eps"),
    "softmax": _softmax,
    "sigmoid": _method("sigmoid"),
    "silu": _function("F.silu"),
    "gelu": _gelu,
    "swiglu": _swiglu,
    "rope_table": _rope_table,
    "rope": _helper("rope"),
    "greedy": lambda _, __, x: Expr(f"{x[0].at(ATOM)}.argmax(dim=-1).int()"),
    "gumbel": _helper("gumbel", "vocab"),
    "sample": _helper("sample"),
    "attend": _helper("attend", "scale"),
    "slots": _slots,
    "visible": _visible,
}
"""Every op but those that are about names and places: parameters, states, calls."""
