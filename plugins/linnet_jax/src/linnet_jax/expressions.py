"""One Python expression of jax.numpy for each op: a table, and what needs the node's types."""

from collections.abc import Callable, Mapping, Sequence

from linnet.spec.program import Attrs, Node
from linnet.spec.types import Dim

CLAIMED = frozenset(
    {
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
    }
)
"""The composites that have an expression; the others are written out in primitives."""

DTYPES = {"float": "FLOAT", "bool": "jnp.bool_"} | {
    short: f"jnp.{long}{short[1:]}"
    for short, long in (
        *((f"f{bits}", "float") for bits in (16, 32, 64)),
        *((f"i{bits}", "int") for bits in (8, 16, 32, 64)),
        *((f"u{bits}", "uint") for bits in (8, 16, 32, 64)),
    )
}
DTYPES["bf16"] = "jnp.bfloat16"

_SIMPLE = {
    "neg": "-{0}",
    "exp": "jnp.exp({0})",
    "log": "jnp.log({0})",
    "rsqrt": "lax.rsqrt({0})",
    "sin": "jnp.sin({0})",
    "cos": "jnp.cos({0})",
    "tanh": "jnp.tanh({0})",
    "erf": "lax.erf({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "jnp.maximum({0}, {1})",
    "minimum": "jnp.minimum({0}, {1})",
    "eq": "{0} == {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "and": "{0} & {1}",
    "xor": "{0} ^ {1}",
    "shift_right": "{0} >> {1}",
    "where": "jnp.where({0}, {1}, {2})",
    "argmax": "jnp.argmax({0}, axis=-1).astype(jnp.int32)",
    "sort": "-jnp.sort(-{0}, axis=-1)",
    "cumsum": "jnp.cumsum({0}, axis=-1)",
    "matmul": "dot({0}, {1})",
    "embedding": "embedding({0}, {1})",
    "softmax": "softmax({0})",
    "sigmoid": "jax.nn.sigmoid({0})",
    "silu": "jax.nn.silu({0})",
    "swiglu": "jax.nn.silu({0}) * {1}",
    "greedy": "greedy({0})",
}
_CALLS = ("linear", "rms_norm", "layer_norm", "rope_table", "rope", "gumbel", "sample")


def shape_text(shape: Sequence[Dim]) -> str:
    """Sizes as arguments; symbolic ones are variables of their name."""
    return ", ".join(map(str, shape))


def _literal(attrs: Attrs) -> str:
    dtype = DTYPES[attrs["dtype"]]
    if attrs["shape"] == ():
        return f"{dtype}({attrs['values'][0]!r})"
    text = f"jnp.array({attrs['values']!r}, {dtype})"
    return text if len(attrs["shape"]) == 1 else f"{text}.reshape({shape_text(attrs['shape'])})"


def _slice(x: str, attrs: Attrs, rank: int) -> str:
    axis = attrs["axis"] % rank
    stretch = f"{attrs['start']}:{attrs['stop']}"
    before = ["..."] if axis == rank - 1 else [":"] * axis
    return f"{x}[{', '.join([*before, stretch])}]"


_SPECIAL: Mapping[str, Callable[[Node, Sequence[str]], str]] = {
    "constant": lambda node, xs: _literal(node.attrs),
    "iota": lambda node, xs: (
        f"jnp.arange({node.attrs['size']}, dtype={DTYPES[node.attrs['dtype']]})"
    ),
    "cast": lambda node, xs: f"{xs[0]}.astype({DTYPES[node.attrs['dtype']]})",
    "reshape": lambda node, xs: f"{xs[0]}.reshape({shape_text(node.attrs['shape'])})",
    "broadcast": lambda node, xs: (
        f"jnp.broadcast_to({xs[0]}, ({shape_text(node.attrs['shape'])},))"
    ),
    "transpose": lambda node, xs: f"{xs[0]}.transpose({shape_text(node.attrs['axes'])})",
    "slice": lambda node, xs: _slice(xs[0], node.attrs, node.inputs[0].type.rank),
    "concat": lambda node, xs: f"jnp.concatenate(({', '.join(xs)},), axis={node.attrs['axis']})",
    "reduce_sum": lambda node, xs: f"jnp.sum({xs[0]}, axis={node.attrs['axis']}, keepdims=True)",
    "reduce_max": lambda node, xs: f"jnp.max({xs[0]}, axis={node.attrs['axis']}, keepdims=True)",
    "gather": lambda node, xs: f"take({xs[0]}, {xs[1]}, axis={node.attrs['axis']})",
    "gelu": lambda node, xs: f"jax.nn.gelu({xs[0]}, approximate={node.attrs['tanh']})",
}

KNOWN = frozenset({*_SIMPLE, *_SPECIAL, *_CALLS, "attention"})
"""Every op that has an expression here; the rest are statements of ``source``."""


def expression(node: Node, operands: Sequence[str]) -> str:
    """The expression of a node, of the names of its operands."""
    if node.op in _SIMPLE:
        return _SIMPLE[node.op].format(*operands)
    if node.op in _SPECIAL:
        return _SPECIAL[node.op](node, operands)
    defaults = {"window": None, "scale": 1.0 if node.op == "rope_table" else ...}
    given = [f"{k}={v!r}" for k, v in node.attrs.items() if defaults.get(k, ...) != v]
    name = "attend" if node.op == "attention" else node.op
    return f"{name}({', '.join([*operands, *given])})"
