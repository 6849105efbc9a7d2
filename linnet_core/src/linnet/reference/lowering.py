"""What each primitive means, in NumPy: one function for each, as plain as possible.

This is the oracle: written to be seen to be right, not to be fast.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from linnet.spec.program import Attrs
from linnet.weights.checkpoint import Array

Lowering = Callable[..., Array]


def _gather(x: Array, ids: Array, *, axis: int) -> Array:
    axis %= x.ndim
    if axis == 0:
        return x[ids]
    # The axes before `axis` are matched: index them by their own coordinates.
    lead = np.indices(ids.shape, sparse=True)[:axis]
    return x[(*lead, ids)]


def _erf(x: Array) -> Array:
    erf: Array = np.vectorize(math.erf, otypes=[x.dtype])(x)
    return erf


def _softly(function: Callable[[Array], Array]) -> Lowering:
    """log(0) is -inf and 1/sqrt(0) inf by definition; NumPy need not warn."""

    def call(x: Array) -> Array:
        with np.errstate(divide="ignore", over="ignore"):
            return function(x)

    return call


def _wrapping(function: Callable[[Array, Array], Array]) -> Lowering:
    """u32 wraps by definition."""

    def call(x: Array, y: Array) -> Array:
        with np.errstate(over="ignore"):
            return function(x, y)

    return call


LOWERINGS: dict[str, Lowering] = {
    "neg": np.negative,
    "exp": _softly(np.exp),
    "log": _softly(np.log),
    "rsqrt": _softly(lambda x: (1.0 / np.sqrt(x)).astype(x.dtype)),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": _erf,
    "add": _wrapping(np.add),
    "sub": _wrapping(np.subtract),
    "mul": _wrapping(np.multiply),
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "and": np.logical_and,
    "xor": np.bitwise_xor,
    "shift_right": np.right_shift,
    "where": np.where,
    "transpose": lambda x, *, axes: np.transpose(x, axes),
    "slice": lambda x, *, axis, start, stop: np.take(x, range(start, stop), axis=axis),
    "concat": lambda *xs, axis: np.concatenate(xs, axis=axis),
    "reduce_sum": lambda x, *, axis: np.sum(x, axis=axis, keepdims=True, dtype=x.dtype),
    "reduce_max": lambda x, *, axis: np.max(x, axis=axis, keepdims=True),
    "argmax": lambda x: np.argmax(x, axis=-1).astype(np.int32),
    "sort": lambda x: -np.sort(-x, axis=-1),
    "cumsum": lambda x: np.cumsum(x, axis=-1, dtype=x.dtype),
    "matmul": np.matmul,
    "gather": _gather,
}
"""Primitives whose result depends only on their inputs and attributes.

The rest (leaves, casts, shapes with symbolic sizes, states) need the run: see ``interpreter``.
"""


def apply(op: str, inputs: list[Array], attrs: Attrs) -> Array:
    """One primitive."""
    attributes: dict[str, Any] = dict(attrs)
    return LOWERINGS[op](*inputs, **attributes)
