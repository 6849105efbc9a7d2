"""Composites: named ops with a canonical body in primitives.

Calling one appends a single node, so that a backend may claim it with a kernel of its own; a
backend that does not gets the body from ``body_of``. The conventions of the whole project are
stated here, once: how a norm scales, which halves a rotary rotates, which end a window counts
from, in which dtype statistics are taken.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from linnet.errors import SpecError
from linnet.spec.attrs import Mismatch, check_arguments, require
from linnet.spec.ops import PRIMITIVES
from linnet.spec.program import Attrs, Function, Node
from linnet.spec.trace import Builder, Tensor, apply, as_tensors, building, current
from linnet.spec.types import Dim, DType, TensorType

COMPOSITES: dict[str, Callable[..., Any]] = {}
"""Name to body."""

NEGATIVE = -3.0e38
"""Stands for minus infinity where a softmax over nothing must stay finite."""


P = ParamSpec("P")
R = TypeVar("R")


def composite(body: Callable[P, R]) -> Callable[P, R]:
    """Make a body into an op: positional arguments are its inputs, keyword ones its attributes.

    An input that is None is left out, so optional inputs come last. An attribute is annotated as
    a number, bool, str, or a tuple of these. The name must be new.
    """
    name = body.__name__.rstrip("_")
    if name in COMPOSITES or name in PRIMITIVES:
        raise ValueError(f"there is an op {name!r} already")
    COMPOSITES[name] = body

    @functools.wraps(body)
    def call(*operands: P.args, **attrs: P.kwargs) -> R:
        builder = current()
        inputs = as_tensors(name, [o for o in operands if o is not None])
        try:
            function = infer_body(name, tuple(t.type for t in inputs), attrs)
        except Mismatch as complaint:
            raise builder.error(name, inputs, str(complaint)) from None
        results: Any = builder.emit(name, inputs, attrs, [v.type for v in function.outputs])
        return results[0] if len(results) == 1 else results  # type: ignore[no-any-return]

    return call


def body_of(node: Node) -> Function:
    """The canonical body of a composite node: primitives and, perhaps, other composites."""
    return infer_body(node.op, tuple(v.type for v in node.inputs), node.attrs)


def infer_body(name: str, types: tuple[TensorType, ...], attrs: Attrs) -> Function:
    """The canonical body for inputs of these types. Raises Mismatch."""
    check_arguments(_signature(name), len(types), attrs)
    return _traced(name, types, tuple(sorted(attrs.items())))


@functools.cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(COMPOSITES[name], eval_str=True)


@functools.lru_cache(maxsize=4096)
def _traced(
    name: str, types: tuple[TensorType, ...], attrs: tuple[tuple[str, Any], ...]
) -> Function:
    builder = Builder(None, name, "")
    with building(builder):
        inputs = [builder.input(type_, "") for type_ in types]
        try:
            result = COMPOSITES[name](*inputs, **dict(attrs))
            return builder.finish(name, result if isinstance(result, tuple) else (result,))
        except SpecError as error:
            raise Mismatch(f"inside it, {error}") from None


# --- small vocabulary of bodies ---------------------------------------------------------------


def cast(x: Tensor, dtype: DType) -> Tensor:
    """``x`` in another dtype; no node if it has it already."""
    return x if x.dtype is dtype else apply("cast", x, dtype=str(dtype))


def reshape(x: Tensor, *shape: Dim) -> Tensor:
    """The same values in row-major order."""
    return apply("reshape", x, shape=shape)


def transpose(x: Tensor, *axes: int) -> Tensor:
    """Axes in another order."""
    return apply("transpose", x, axes=axes)


def slice_last(x: Tensor, start: int, stop: int) -> Tensor:
    """``x[..., start:stop]``."""
    return apply("slice", x, axis=-1, start=start, stop=stop)


def concat_last(*parts: Tensor) -> Tensor:
    """Parts joined along the last axis."""
    return apply("concat", *parts, axis=-1)


def iota(size: Dim, dtype: DType = DType.I32) -> Tensor:
    """0, 1, 2, ..."""
    return apply("iota", size=size, dtype=str(dtype))


def constant(values: tuple[float, ...], dtype: DType) -> Tensor:
    """A vector of literal values."""
    return apply("constant", values=values, dtype=str(dtype), shape=(len(values),))


def scalar(value: float, dtype: DType) -> Tensor:
    """A literal number."""
    return apply("constant", values=(value,), dtype=str(dtype), shape=())


def broadcast(x: Tensor, *shape: Dim) -> Tensor:
    """``x`` repeated to a shape."""
    return apply("broadcast", x, shape=shape)


def where(condition: Tensor, x: "Tensor | float", y: "Tensor | float") -> Tensor:
    """``x`` where the condition holds, else ``y``."""
    return apply("where", condition, x, y)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """``x[..., M, K] @ y[..., K, N]``."""
    return apply("matmul", x, y)


def gather(x: Tensor, ids: Tensor, axis: int) -> Tensor:
    """``x[i]`` along an axis, the axes before it matched one to one."""
    return apply("gather", x, ids, axis=axis)


def _last(x: Tensor) -> Dim:
    require(len(x.shape) > 0, "takes at least one axis")
    return x.shape[-1]


def _wide(x: Tensor) -> Tensor:
    """A float in f32."""
    require(x.dtype.is_float, f"takes a float dtype, not {x.dtype}")
    return cast(x, DType.F32)


def _mean(x: Tensor) -> Tensor:
    size = _last(x)
    if isinstance(size, str):
        raise Mismatch(f"the last axis must be of fixed size, not {size}")
    return apply("reduce_sum", x, axis=-1) * (1.0 / size)


# --- layers -----------------------------------------------------------------------------------


@composite
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[..., K] @ weight[N, K].T (+ bias[N])``."""
    require(len(weight.shape) == 2, f"the weight is {weight.type}, not [N, K]")
    n, k = weight.shape
    require(_last(x) == k, f"the input's last size is {_last(x)}, the weight's {k}")
    if bias is not None:
        require(bias.shape == (n,), f"the bias is {bias.type}, not [{n}]")
    y = matmul(x, transpose(weight, 1, 0))
    return y if bias is None else y + bias


@composite
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[V, D]`` at i32 ``ids[...]``, giving ``[..., D]``."""
    require(len(weight.shape) == 2, f"the weight is {weight.type}, not [V, D]")
    return gather(weight, ids, axis=0)


@composite
def rms_norm(x: Tensor, scale: Tensor, *, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis, computed in f32.

    ``scale`` is what the normalised value is multiplied with: a file that stores ``scale - 1``
    says so in its binding. Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    require(scale.shape == (_last(x),), f"the scale is {scale.type}, not [{_last(x)}]")
    wide = _wide(x)
    normed = wide * apply("rsqrt", _mean(wide * wide) + eps)
    return cast(normed * cast(scale, DType.F32), x.dtype)


@composite
def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * scale (+ bias)`` over the last axis, in f32.

    Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.
    """
    require(scale.shape == (_last(x),), f"the scale is {scale.type}, not [{_last(x)}]")
    if bias is not None:
        require(bias.shape == (_last(x),), f"the bias is {bias.type}, not [{_last(x)}]")
    wide = _wide(x)
    centred = wide - _mean(wide)
    y = centred * apply("rsqrt", _mean(centred * centred) + eps) * cast(scale, DType.F32)
    return cast(y if bias is None else y + cast(bias, DType.F32), x.dtype)


@composite
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last axis, in f32 whatever the dtype of ``x``."""
    wide = _wide(x)
    exp = apply("exp", wide - apply("reduce_max", wide, axis=-1))
    return cast(exp / apply("reduce_sum", exp, axis=-1), x.dtype)


@composite
def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, as ``(1 + tanh(x / 2)) / 2``, which does not overflow."""
    return (apply("tanh", x * 0.5) + 1.0) * 0.5


@composite
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``. Source: arXiv 1702.03118."""
    return x * sigmoid(x)


@composite
def gelu(x: Tensor, *, tanh: bool) -> Tensor:
    """``x * Φ(x)``, exactly or by its tanh approximation. Source: arXiv 1606.08415."""
    if tanh:
        inner = (x + x * x * x * 0.044715) * 0.7978845608028654
        return x * 0.5 * (apply("tanh", inner) + 1.0)
    return x * 0.5 * (apply("erf", x * 0.7071067811865476) + 1.0)


@composite
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``. Source: Shazeer 2020, arXiv 2002.05202."""
    require(gate.type == up.type, f"gate {gate.type} and up {up.type} differ")
    return silu(gate) * up


# --- positions and attention ------------------------------------------------------------------


@composite
def rope_table(
    positions: Tensor, *, frequencies: tuple[float, ...], scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, f32 ``[B, S, len(frequencies)]``, of ``positions[B, S] * frequency``.

    ``scale`` multiplies both (YaRN's attention factor). Always f32: at position 8191 a bf16
    angle would be off by whole turns.
    """
    require(positions.dtype is DType.I32, f"positions are {positions.dtype}, not i32")
    angles = cast(reshape(positions, *positions.shape, 1), DType.F32) * constant(
        frequencies, DType.F32
    )
    cos, sin = apply("cos", angles), apply("sin", angles)
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


@composite
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x[B, S, H, D]`` by f32 tables ``[B, S, N]``, in f32.

    Half-split: dimension ``i < N`` is paired with ``i + N``; dimensions from ``2N`` on pass as
    they are. Source: Su et al. 2021, arXiv 2104.09864, with GPT-NeoX's pairing.
    """
    require(len(x.shape) == 4, f"takes [B, S, H, D], not {x.type}")
    batch, length, _, size = x.shape
    half = _last(cos)
    if isinstance(half, str) or isinstance(size, str):
        raise Mismatch("the last axis of x and of the tables must be of fixed size")
    require(
        cos.type == sin.type == TensorType(DType.F32, (batch, length, half)),
        f"tables {cos.type} and {sin.type} do not fit x {x.type}",
    )
    require(2 * half <= size, f"tables of {half} rotate {2 * half} of only {size} dimensions")
    cos, sin = (reshape(table, batch, length, 1, half) for table in (cos, sin))
    wide = _wide(x)
    first, second = slice_last(wide, 0, half), slice_last(wide, half, 2 * half)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < size:
        parts.append(slice_last(wide, 2 * half, size))
    return cast(concat_last(*parts), x.dtype)


@composite
def attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention with grouped heads: q ``[B, S, H, D]``, k and v ``[B, T, K, D]``.

    Key ``j`` of a row stands at position ``j``. A query at i32 ``positions[B, S]`` sees keys
    ``j <= position`` and, with a window, ``j > position - window``: a window of 1 is the token
    itself. Query head ``h`` reads key head ``h // (H / K)``. Softmax is in f32. A query that
    sees nothing (position < 0) gives something finite. Returns ``[B, S, H, D]``.
    """
    for x in (q, k, v):
        require(len(x.shape) == 4, f"takes [B, S, H, D], not {x.type}")
    batch, length, heads, size = q.shape
    _, context, groups, value_size = v.shape
    require(
        k.shape == (batch, context, groups, size),
        f"keys {k.type} do not fit queries {q.type} and values {v.type}",
    )
    if isinstance(heads, str) or isinstance(groups, str):
        raise Mismatch("the number of heads must be fixed")
    require(heads % groups == 0, f"{heads} heads do not share {groups} key heads evenly")
    require(
        positions.type == TensorType(DType.I32, (batch, length)),
        f"positions are {positions.type}, not i32[{batch}, {length}]",
    )
    require(window is None or window > 0, f"the window is {window}, not positive")

    per_group = heads // groups
    queries = transpose(reshape(q, batch, length, groups, per_group, size), 0, 2, 3, 1, 4)
    keys = reshape(transpose(k, 0, 2, 3, 1), batch, groups, 1, size, context)
    values = reshape(transpose(v, 0, 2, 1, 3), batch, groups, 1, context, value_size)
    scores = cast(matmul(queries, keys), DType.F32) * scale  # [B, K, H/K, S, T]

    query_at = reshape(positions, batch, length, 1)
    key_at = iota(context)
    visible = apply("le", key_at, query_at)
    if window is not None:
        visible = apply("and", visible, apply("lt", query_at - window, key_at))
    scores = where(reshape(visible, batch, 1, 1, length, context), scores, NEGATIVE)
    y = matmul(cast(softmax(scores), q.dtype), values)  # [B, K, H/K, S, D]
    return reshape(transpose(y, 0, 3, 1, 2, 4), batch, length, heads, value_size)


# --- choosing a token -------------------------------------------------------------------------


@composite
def greedy(logits: Tensor) -> Tensor:
    """The likeliest token, i32 ``[B]``, of f32 ``logits[B, V]``; the first among equals."""
    return apply("argmax", logits)


@composite
def gumbel(seeds: Tensor, positions: Tensor, *, vocab: int) -> Tensor:
    """Gumbel noise, f32 ``[B, vocab]``, hashed from seed, position and token id.

    It depends on nothing else, so a request gives the same tokens on every backend and in any
    batch. The hash is MurmurHash3's 32-bit finalizer, applied once for each of the three.
    """
    require(
        seeds.type == positions.type and (seeds.dtype, len(seeds.shape)) == (DType.I32, 1),
        f"seeds and positions are {seeds.type} and {positions.type}, not i32[B] both",
    )
    batch = seeds.shape[0]

    def mix(h: Tensor) -> Tensor:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = apply("xor", h, apply("shift_right", h, shift)) * factor
        return apply("xor", h, apply("shift_right", h, 16))

    row = mix(apply("xor", mix(cast(seeds, DType.U32) + 0x9E3779B9), cast(positions, DType.U32)))
    bits = mix(apply("xor", reshape(row, batch, 1), iota(vocab, DType.U32)))
    uniform = (cast(apply("shift_right", bits, 8), DType.F32) + 0.5) * 2.0**-24
    return -apply("log", -apply("log", uniform))


@composite
def sample(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """A token for each row, i32 ``[B]``, of f32 ``logits[B, V]``; one option of each per row.

    Temperature (0 is greedy), then the ``top_k`` likeliest (0 is all), then the fewest whose
    mass reaches ``top_p`` (1 is all), then those at least ``min_p`` times as likely as the
    likeliest (0 is all). Tokens as likely as the last one kept are kept too. ``positions`` is
    where the chosen token will stand; with ``seeds`` it decides the noise.
    """
    require(len(logits.shape) == 2, f"takes logits [B, V], not {logits.type}")
    batch, vocab = logits.shape
    if isinstance(vocab, str):
        raise Mismatch("the vocabulary must be of fixed size")
    for name, option, dtype in (
        ("positions", positions, DType.I32),
        ("seeds", seeds, DType.I32),
        ("temperature", temperature, DType.F32),
        ("top_k", top_k, DType.I32),
        ("top_p", top_p, DType.F32),
        ("min_p", min_p, DType.F32),
    ):
        want = TensorType(dtype, (batch,))
        require(option.type == want, f"{name} is {option.type}, not {want}")

    def column(x: Tensor) -> Tensor:
        return reshape(x, batch, 1)

    random = apply("lt", 0.0, temperature)
    scaled = logits / column(where(random, temperature, 1.0))
    ranked = apply("sort", scaled)
    best = slice_last(ranked, 0, 1)

    unlimited = apply("le", top_k, 0)
    k = column(where(unlimited, vocab, apply("minimum", top_k, vocab)))
    inside = apply("lt", iota(vocab), k)
    mass = softmax(where(inside, ranked, NEGATIVE))
    nucleus = apply("and", inside, apply("lt", apply("cumsum", mass) - mass, column(top_p)))
    everything = apply("le", 1.0, column(top_p))
    one, zero = scalar(1, DType.I32), scalar(0, DType.I32)
    kept = where(everything, where(inside, one, zero), where(nucleus, one, zero))
    last = apply("maximum", apply("reduce_sum", kept, axis=-1) - 1, 0)
    threshold = gather(ranked, last, axis=1)

    floor = best + column(apply("log", apply("maximum", min_p, 1e-30)))
    keep = apply("and", apply("le", threshold, scaled), apply("le", floor, scaled))
    noise = gumbel(seeds, positions, vocab=vocab)
    choice = apply("argmax", where(keep, scaled + noise, NEGATIVE))
    return where(random, choice, greedy(logits))
