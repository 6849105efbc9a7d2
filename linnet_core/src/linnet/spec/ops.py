"""The primitives: the closed set of ops that every backend must know.

``PRIMITIVES`` is the table: for each op its meaning, its attributes, and the rule that gives its
result types. A violation raises ``Mismatch``, which the tracer turns into a SpecError with the
block and line. Elementwise ops broadcast as NumPy does, never promote dtypes, and treat a
symbolic size as equal only to itself or to 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from linnet.spec.attrs import Mismatch, check_attrs, require
from linnet.spec.program import Attrs
from linnet.spec.types import Dim, DType, TensorType

Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Primitive:
    """An op that a backend must lower. ``infer`` maps input types and attributes to results."""

    name: str
    meaning: str
    attrs: tuple[str, ...]
    infer: Callable[[Types, Attrs], Types]


PRIMITIVES: dict[str, Primitive] = {}


def infer(op: str, types: Types, attrs: Attrs) -> Types:
    """The result types of a primitive. Raises Mismatch for wrong inputs or attributes."""
    require(op in PRIMITIVES, "is not a primitive")
    primitive = PRIMITIVES[op]
    check_attrs(primitive.attrs, attrs)
    return primitive.infer(types, attrs)


def _primitive(
    name: str, meaning: str, attrs: Sequence[str] = ()
) -> Callable[[Callable[[Types, Attrs], Types]], Callable[[Types, Attrs], Types]]:
    def add(infer: Callable[[Types, Attrs], Types]) -> Callable[[Types, Attrs], Types]:
        PRIMITIVES[name] = Primitive(name, meaning, tuple(attrs), infer)
        return infer

    return add


def broadcast_shapes(*shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The NumPy broadcast of shapes whose sizes may be names."""
    rank = max(map(len, shapes))
    result: list[Dim] = []
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis]
        wide = [size for size in sizes if size != 1]
        different = dict.fromkeys(wide)
        require(
            len(different) <= 1,
            f"sizes {' and '.join(map(str, different))} at axis {axis} do not broadcast",
        )
        result.append(wide[0] if wide else 1)
    return tuple(result)


def _arity(types: Types, *counts: int) -> None:
    require(len(types) in counts, f"takes {' or '.join(map(str, counts))} inputs, not {len(types)}")


def _axis(axis: int, rank: int) -> int:
    require(-rank <= axis < rank, f"axis {axis} is outside a rank of {rank}")
    return axis % rank


def _fixed(size: Dim, what: str) -> int:
    if isinstance(size, str):
        raise Mismatch(f"{what} must be a fixed size, not the symbolic {size}")
    return size


# --- leaves ---------------------------------------------------------------------------------


@_primitive("parameter", "a tensor of the checkpoint, by its path in this block", ("path", "shape"))
def _parameter(types: Types, attrs: Attrs) -> Types:
    _arity(types, 0)
    return (TensorType(DType.FLOAT, attrs["shape"]),)


@_primitive("constant", "literal values in row-major order", ("values", "dtype", "shape"))
def _constant(types: Types, attrs: Attrs) -> Types:
    _arity(types, 0)
    size = 1
    for extent in attrs["shape"]:
        size *= _fixed(extent, "a constant's shape")
    values, dtype = attrs["values"], DType(attrs["dtype"])
    require(len(values) == size, f"has {len(values)} values for a shape of {size}")
    for value in values:
        require(_holds(dtype, value), f"{value!r} is not a value of {dtype}")
    return (TensorType(dtype, attrs["shape"]),)


def _holds(dtype: DType, value: Any) -> bool:
    """Whether a literal is a value of the dtype; a float is rounded to its nearest."""
    if dtype is DType.BOOL:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if dtype.is_float:
        return True
    bits, signed = 8 * dtype.itemsize, dtype.startswith("i")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    return isinstance(value, int) and low <= value < high


@_primitive("iota", "0, 1, 2, ... along one axis", ("size", "dtype"))
def _iota(types: Types, attrs: Attrs) -> Types:
    _arity(types, 0)
    size, dtype = attrs["size"], DType(attrs["dtype"])
    require(dtype is not DType.BOOL, "counts in numbers, not bool")
    if isinstance(size, int):
        require(_holds(dtype, size - 1), f"{size} numbers from 0 on do not fit {dtype}")
    return (TensorType(dtype, (size,)),)


# --- elementwise ----------------------------------------------------------------------------


@_primitive("cast", "to another dtype; integers wrap, floats round to nearest even", ("dtype",))
def _cast(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    return (TensorType(DType(attrs["dtype"]), types[0].shape),)


def _unary(types: Types, _: Attrs) -> Types:
    _arity(types, 1)
    require(types[0].dtype.is_float, f"takes a float dtype, not {types[0].dtype}")
    return types


for _name, _meaning in {
    "neg": "-x",
    "exp": "e to the x",
    "log": "natural logarithm; log(0) is -inf",
    "rsqrt": "1 / sqrt(x)",
    "sin": "sine of radians",
    "cos": "cosine of radians",
    "tanh": "hyperbolic tangent",
    "erf": "error function",
}.items():
    _primitive(_name, _meaning)(_unary)


def _same_dtype(types: Types) -> DType:
    dtypes = dict.fromkeys(t.dtype for t in types)
    require(len(dtypes) == 1, f"dtypes {' and '.join(dtypes)} differ; cast one of them")
    return types[0].dtype


def _binary(types: Types, _: Attrs) -> Types:
    _arity(types, 2)
    dtype = _same_dtype(types)
    _numbers(types)
    return (TensorType(dtype, broadcast_shapes(*(t.shape for t in types))),)


for _name, _meaning in {
    "add": "x + y",
    "sub": "x - y",
    "mul": "x * y; u32 wraps",
    "maximum": "the larger of x and y",
    "minimum": "the smaller of x and y",
}.items():
    _primitive(_name, _meaning)(_binary)


@_primitive("div", "x / y, of floats")
def _div(types: Types, attrs: Attrs) -> Types:
    result = _binary(types, attrs)
    require(result[0].dtype.is_float, f"takes a float dtype, not {result[0].dtype}")
    return result


def _compare(types: Types, attrs: Attrs) -> Types:
    return (TensorType(DType.BOOL, _binary(types, attrs)[0].shape),)


for _name, _meaning in {"eq": "x = y", "lt": "x < y", "le": "x <= y"}.items():
    _primitive(_name, _meaning)(_compare)


@_primitive("and", "both, of bools")
def _and(types: Types, _: Attrs) -> Types:
    _arity(types, 2)
    require(_same_dtype(types) is DType.BOOL, f"takes bools, not {types[0].dtype}")
    return (TensorType(DType.BOOL, broadcast_shapes(*(t.shape for t in types))),)


def _bits(types: Types, _: Attrs) -> Types:
    _arity(types, 2)
    require(_same_dtype(types) is DType.U32, f"takes u32, not {types[0].dtype}")
    return (TensorType(DType.U32, broadcast_shapes(*(t.shape for t in types))),)


_primitive("xor", "bitwise exclusive or of u32")(_bits)
_primitive("shift_right", "logical shift of u32 x by y < 32 bits")(_bits)


@_primitive("where", "x where the condition holds, else y")
def _where(types: Types, _: Attrs) -> Types:
    _arity(types, 3)
    condition, *branches = types
    require(condition.dtype is DType.BOOL, f"the condition is {condition.dtype}, not bool")
    dtype = _same_dtype(tuple(branches))
    return (TensorType(dtype, broadcast_shapes(*(t.shape for t in types))),)


# --- shape ----------------------------------------------------------------------------------


@_primitive("reshape", "the same values in row-major order; symbolic sizes must pass", ("shape",))
def _reshape(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    old, new = types[0].shape, tuple(attrs["shape"])

    def split(shape: tuple[Dim, ...]) -> tuple[int, list[str]]:
        size, names = 1, []
        for extent in shape:
            if isinstance(extent, str):
                names.append(extent)
            else:
                size *= extent
        return size, sorted(names)

    require(split(old) == split(new), f"{list(old)} and {list(new)} do not hold as many values")
    return (TensorType(types[0].dtype, new),)


@_primitive("broadcast", "repeated to a shape that it broadcasts to", ("shape",))
def _broadcast(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    shape = tuple(attrs["shape"])
    require(
        broadcast_shapes(types[0].shape, shape) == shape,
        f"{list(types[0].shape)} does not broadcast to {list(shape)}",
    )
    return (TensorType(types[0].dtype, shape),)


@_primitive("transpose", "axes in another order", ("axes",))
def _transpose(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    shape, axes = types[0].shape, attrs["axes"]
    require(
        sorted(axes) == list(range(len(shape))), f"axes {list(axes)} do not permute {list(shape)}"
    )
    return (TensorType(types[0].dtype, tuple(shape[axis] for axis in axes)),)


@_primitive("slice", "start:stop of one axis of fixed size", ("axis", "start", "stop"))
def _slice(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    shape = list(types[0].shape)
    axis = _axis(attrs["axis"], len(shape))
    size, start, stop = _fixed(shape[axis], "a sliced axis"), attrs["start"], attrs["stop"]
    require(0 <= start < stop <= size, f"{start}:{stop} is outside an axis of {size}")
    shape[axis] = stop - start
    return (TensorType(types[0].dtype, tuple(shape)),)


@_primitive("concat", "one after the other along an axis of fixed sizes", ("axis",))
def _concat(types: Types, attrs: Attrs) -> Types:
    require(len(types) > 0, "takes at least one input")
    dtype = _same_dtype(types)
    axis = _axis(attrs["axis"], types[0].rank)
    rests = {t.shape[:axis] + t.shape[axis + 1 :] for t in types}
    require(len(rests) == 1, f"shapes differ outside axis {axis}")
    total = sum(_fixed(t.shape[axis], "a joined axis") for t in types)
    shape = types[0].shape
    return (TensorType(dtype, (*shape[:axis], total, *shape[axis + 1 :])),)


# --- along an axis --------------------------------------------------------------------------


def _numbers(types: Types) -> None:
    require(types[0].dtype is not DType.BOOL, "takes numbers, not bool")


def _reduce(types: Types, attrs: Attrs) -> Types:
    _arity(types, 1)
    _numbers(types)
    axis = _axis(attrs["axis"], types[0].rank)
    shape = list(types[0].shape)
    shape[axis] = 1
    return (TensorType(types[0].dtype, tuple(shape)),)


_primitive("reduce_sum", "sum along an axis, kept with size 1", ("axis",))(_reduce)
_primitive("reduce_max", "largest along an axis, kept with size 1", ("axis",))(_reduce)


@_primitive("argmax", "i32 index of the largest along the last axis, the first among equals")
def _argmax(types: Types, _: Attrs) -> Types:
    _arity(types, 1)
    _numbers(types)
    _axis(-1, types[0].rank)
    return (TensorType(DType.I32, types[0].shape[:-1]),)


@_primitive("sort", "values along the last axis, largest first")
def _sort(types: Types, _: Attrs) -> Types:
    _arity(types, 1)
    _numbers(types)
    _axis(-1, types[0].rank)
    return types


@_primitive("cumsum", "running sum along the last axis")
def _cumsum(types: Types, _: Attrs) -> Types:
    _arity(types, 1)
    _numbers(types)
    _axis(-1, types[0].rank)
    return types


@_primitive("matmul", "x[..., M, K] @ y[..., K, N], batch axes broadcast, summed in f32 or wider")
def _matmul(types: Types, _: Attrs) -> Types:
    _arity(types, 2)
    dtype = _same_dtype(types)
    require(dtype.is_float, f"takes a float dtype, not {dtype}")
    x, y = (t.shape for t in types)
    require(min(len(x), len(y)) >= 2, "takes at least two axes")
    require(x[-1] == y[-2], f"inner sizes {x[-1]} and {y[-2]} differ")
    batch = broadcast_shapes((*x[:-2], 1), (*y[:-2], 1))[:-1]
    return (TensorType(dtype, (*batch, x[-2], y[-1])),)


@_primitive(
    "gather",
    "x[i] along an axis for every i of an i32 tensor; the axes before it are matched one to one",
    ("axis",),
)
def _gather(types: Types, attrs: Attrs) -> Types:
    _arity(types, 2)
    x, ids = types
    require(ids.dtype is DType.I32, f"takes i32 indices, not {ids.dtype}")
    axis = _axis(attrs["axis"], x.rank)
    require(
        x.shape[:axis] == ids.shape[:axis],
        f"axes before axis {axis} differ: {list(x.shape[:axis])} and {list(ids.shape[:axis])}",
    )
    return (TensorType(x.dtype, ids.shape + x.shape[axis + 1 :]),)


# --- states ---------------------------------------------------------------------------------


def _state_shape(attrs: Attrs) -> tuple[Dim, ...]:
    shape: tuple[Dim, ...] = attrs["shape"]
    require(len(shape) >= 2, f"a state of shape {list(shape)} lacks a row and a position axis")
    return shape


@_primitive(
    "state_read",
    "the cache rows named by an i32[B] input, or without it every row in order",
    ("state", "shape"),
)
def _state_read(types: Types, attrs: Attrs) -> Types:
    _arity(types, 0, 1)
    rows, *rest = _state_shape(attrs)
    if types:
        require(
            types[0].dtype is DType.I32 and types[0].rank == 1, f"rows are i32[B], not {types[0]}"
        )
        rows = types[0].shape[0]
    return (TensorType(DType.FLOAT, (rows, *rest)),)


@_primitive(
    "state_write",
    "values[b, s] go to position starts[b] + s, for s < lengths[b], of cache row rows[b], "
    "or without rows of row b",
    ("state", "shape"),
)
def _state_write(types: Types, attrs: Attrs) -> Types:
    _arity(types, 3, 4)
    values, *indices = types
    shape, batch = _state_shape(attrs), values.shape[:1]
    require(
        values.dtype is DType.FLOAT and values.rank == len(shape) and values.shape[2:] == shape[2:],
        f"values {values} do not fit a state of shape {list(shape)}",
    )
    require(
        len(indices) == 3 or batch == shape[:1],
        f"without rows, values {values} must have a row for each of {shape[0]}",
    )
    for name, index in zip(("starts", "lengths", "rows"), indices, strict=False):
        require(
            index.dtype is DType.I32 and index.shape == batch,
            f"{name} must be i32[{batch[0]}], not {index}",
        )
    return ()


# --- calls (their rule needs the callee, so the tracer and the checker apply it) -------------

CALLS = {"call": ("function", "at"), "loop": ("function", "at", "start", "stop")}
"""``call`` runs a function with its block at ``at``; ``loop`` runs it at ``at.start``, then
``at.start+1``, ... up to ``stop``, each time feeding its outputs back as its first inputs.
By name, with their attributes."""
