"""What generated files begin with: those definitions that they use are copied as text.

Nothing here knows of Linnet. Every function is pure.
"""

# ruff: noqa: N806  (sizes are capitals, as in the comments)

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

PLATFORM = jax.default_backend()  # what lowerings are chosen for
FLOAT: Any = jnp.float32  # a generated file has a line of its own for it
YNN = True  # whether XLA's CPU compiler gives sums to its YNN library, as it does unless told


class Tree(SimpleNamespace):
    """A branch of weights or of caches: a pytree with named branches."""


jax.tree_util.register_pytree_with_keys(
    Tree,
    lambda tree: (
        [(jax.tree_util.GetAttrKey(name), value) for name, value in vars(tree).items()],
        tuple(vars(tree)),
    ),
    lambda names, values: Tree(**dict(zip(names, values, strict=True))),
)


def nest(flat: dict[str, Array]) -> Any:
    """{"layers.0.norm.weight": array} as a tree: tree.layers[0].norm.weight."""
    branches: dict[str, Any] = {}
    for path, array in flat.items():
        name, _, rest = path.partition(".")
        if rest:
            branches.setdefault(name, {})[rest] = array
        else:
            branches[name] = array
    nested = {k: nest(v) if isinstance(v, dict) else v for k, v in branches.items()}
    if nested and all(name.isdecimal() for name in nested):
        return [nested[name] for name in sorted(nested, key=int)]
    return Tree(**nested)


def join(flat: dict[str, Array], at: str, parts: tuple[str, ...], whole: str) -> None:
    """Lay weights that multiply the same input one below the other: one product for all."""
    flat[f"{at}.{whole}"] = jnp.concatenate([flat.pop(f"{at}.{part}") for part in parts])


def wide(x: Array) -> Array:
    """What a product of two-byte floats is computed in: f32 on a CPU, whose dot has no other."""
    return x.astype(jnp.float32) if PLATFORM == "cpu" else x


def dot(x: Array, y: Array) -> Array:
    """x [..., M, K] @ y [..., K, N], summed in f32 of unrounded products, as x's dtype."""
    product = jnp.matmul(x, y, precision="highest", preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def barrier(x: Array) -> Array:
    """x, which XLA does not merge with what is done to it."""
    return lax.optimization_barrier(x)  # type: ignore[no-any-return, no-untyped-call]


@jax.custom_jvp
def pairs(y: Array) -> tuple[Array, Array]:
    """The first and the second of each two of y [..., 2], in f32."""
    if y.dtype != jnp.bfloat16:
        return wide(y[..., 0]), wide(y[..., 1])
    # Two are read as one word: as bits, a bf16 is the upper half of an f32.
    words = lax.bitcast_convert_type(y, jnp.uint32)
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    return tuple(lax.bitcast_convert_type(half, jnp.float32) for half in halves)  # type: ignore[return-value]


pairs.defjvp(lambda at, along: (pairs(*at), (wide(along[0][..., 0]), wide(along[0][..., 1]))))


def products(x: Array, y: Array) -> Array:
    """x f32 times y, to be summed over the last axis; added up by twos where YNN takes no sums."""
    if YNN or y.shape[-1] % 2:
        return x * wide(y)
    x, y = (z.reshape(*z.shape[:-1], -1, 2) for z in (x, y))
    first, second = pairs(y)
    return first * x[..., 0] + second * x[..., 1]


def total(x: Array) -> Array:
    """The sum over the last axis of f32, in blocks of at most 32 where YNN takes none.

    XLA takes apart sums of more than 32, and makes one of two that meet, whose loop would not
    follow the memory.
    """
    while not YNN and x.shape[-1] > 32:
        x = barrier(jnp.sum(blocks(x, -1, 32), axis=-1))
    return jnp.sum(x, axis=-1)


def blocks(x: Array, axis: int, most: int) -> Array:
    """An axis as two, the second of at most `most`, or of all of it where nothing divides it."""
    axis %= x.ndim
    size = x.shape[axis]
    block = max((d for d in range(2, most + 1) if size % d == 0), default=size)
    return x.reshape(*x.shape[:axis], size // block, block, *x.shape[axis + 1 :])


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [..., K] times the transposed weight [N, K], summed in f32."""
    rows = math.prod(x.shape[:-1])
    if PLATFORM == "cpu" and weight.dtype != jnp.float32 and rows <= 4:
        # XLA's CPU dot of two-byte floats is many times slower than sums of products.
        parts = [total(products(row, weight)) for row in wide(x).reshape(rows, -1)]
        y = jnp.stack(parts).reshape(*x.shape[:-1], -1)
    else:
        contract = (((x.ndim - 1,), (1,)), ((), ()))
        y = lax.dot_general(
            wide(x), wide(weight), contract, precision="highest", preferred_element_type=jnp.float32
        )
    y = y.astype(x.dtype)
    return y if bias is None else y + bias


@jax.custom_jvp
def embedding(ids: Array, table: Array) -> Array:
    """Rows of a table [V, D]: [..., D]."""
    if PLATFORM == "cpu" and table.dtype != jnp.float32:
        # To gather two-byte floats, XLA's CPU widens all of the table; of integers, nothing.
        return lax.bitcast_convert_type(lax.bitcast_convert_type(table, jnp.uint16)[ids], FLOAT)
    return table[ids]


embedding.defjvp(lambda at, along: (embedding(*at), along[1][at[0]]))


def greedy(logits: Array) -> Array:
    """The first of the largest of logits [B, V]: a maximum and a minimum, which are vectors."""
    V = logits.shape[-1]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == largest, jnp.arange(V, dtype=jnp.int32), V - 1), axis=-1)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x over its root mean square, times scale, in f32."""
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: Array, scale: Array, bias: Array | None = None, *, eps: float) -> Array:
    """x less its mean, over its deviation, times scale, plus bias, in f32."""
    h = x.astype(jnp.float32)
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps) * scale.astype(jnp.float32)
    return (h if bias is None else h + bias.astype(jnp.float32)).astype(x.dtype)


def softmax(x: Array) -> Array:
    """Softmax over the last axis, in f32."""
    return jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype)


def rope_table(
    positions: Array, frequencies: tuple[float, ...], scale: float = 1.0
) -> tuple[Array, Array]:
    """Cosines and sines of positions [B, S] times N frequencies: f32 [B, S, N]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.array(frequencies, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate dimension i of x [B, S, H, D] with dimension i + N, by tables [B, S, N], in f32."""
    N = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, N]
    h = x.astype(jnp.float32)
    first, second = h[..., :N], h[..., N : 2 * N]
    parts = (first * cos - second * sin, second * cos + first * sin, h[..., 2 * N :])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def attend(
    q: Array, k: Array, v: Array, positions: Array, *, scale: float, window: int | None = None
) -> Array:
    """Causal attention of q [B, S, H, D] at positions [B, S] to keys and values [B, T, K, D].

    H / K query heads share a key head. A query sees keys up to its own position, at most
    `window` of them; one at a negative position gives something finite.
    """
    B, S, H, D = q.shape
    T, K = k.shape[1:3]
    few = PLATFORM == "cpu" and not YNN and B * S <= 4
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    heads = q.reshape(B, S, K, H // K, D).transpose(0, 2, 3, 1, 4)  # [B, K, H / K, S, D]
    if few:  # sums read keys and values where they lie; a dot takes a transposed copy
        flat = wide(heads).reshape(B, 1, K, -1, D)
        scores = total(products(flat, k[:, :, :, None])).transpose(0, 2, 3, 1)
        scores = scores.reshape(B, K, H // K, S, T) * scale
    else:
        scores = product("bkgsd,btkd->bkgst", wide(heads), wide(k)) * scale
    key, query = jnp.arange(T), positions[:, None, None, :, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    p = softmax(jnp.where(visible, scores, -3.0e38)).astype(q.dtype)
    if few:
        p = wide(p).reshape(B, K, -1, T, 1).transpose(2, 0, 3, 1, 4)  # [H / K * S, B, T, K, 1]
        parts = [jnp.sum(blocks(x * wide(v), 1, 8), axis=2) for x in barrier(p)]
        y = jnp.stack([jnp.sum(barrier(part), axis=1) for part in parts], axis=2)
        y = y.reshape(B, K, H // K, S, -1)
    else:
        y = product("bkgst,btkd->bkgsd", wide(p), wide(v))
    return y.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, S, H, v.shape[-1])


def read(cache: Array, end: int, rows: Array | None = None) -> Array:
    """The first `end` positions of the given rows of a cache, or of all, as floats."""
    x = cache[:, :end] if rows is None else cache[rows, :end]
    return lax.bitcast_convert_type(x, FLOAT)


def write(
    cache: Array, x: Array, starts: Array, lengths: Array, rows: Array | None = None
) -> Array:
    """The cache [R, T, ...] with the first lengths[b] of x [B, S, ...] from starts[b] on."""
    B, S = x.shape[:2]
    x = lax.bitcast_convert_type(x.astype(FLOAT), cache.dtype)
    if cache.shape[1] == S or B > 4:
        where = jnp.arange(S)
        positions = jnp.where(where < lengths[:, None], starts[:, None] + where, cache.shape[1])
        rows = jnp.arange(B) if rows is None else rows
        return cache.at[rows[:, None], positions].set(x, mode="drop")
    # A few rows: slices, which start earlier where they would pass the end of the cache.
    for b in range(B):
        first = jnp.clip(starts[b], 0, cache.shape[1] - S)
        late = starts[b] - first
        at = (b if rows is None else rows[b], first, *(0 for _ in x.shape[2:]))
        old = lax.dynamic_slice(cache, at, (1, *x.shape[1:]))
        token = (jnp.arange(S) - late).reshape(1, S, *(1 for _ in x.shape[2:]))
        new = jnp.roll(x[b : b + 1], late, axis=1) if S > 1 else x[b : b + 1]
        real = (token >= 0) & (token < lengths[b])
        cache = lax.dynamic_update_slice(cache, jnp.where(real, new, old), at)
    return cache


def take(x: Array, ids: Array, axis: int) -> Array:
    """x[i] along an axis for every i of ids; the axes before it are matched one to one."""
    axis %= x.ndim
    lead = jnp.indices(ids.shape, sparse=True)[:axis]
    return x.at[(*lead, ids)].get(mode="clip")


def gumbel(seeds: Array, positions: Array, vocab: int) -> Array:
    """Gumbel noise f32 [B, vocab], hashed from seed, position and token id alone.

    The hash is MurmurHash3's 32-bit finalizer.
    """

    def mix(h: Array) -> Array:
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return h ^ (h >> 16)

    row = mix(mix(seeds.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)) ^ positions.astype(jnp.uint32))
    bits = mix(row[:, None] ^ jnp.arange(vocab, dtype=jnp.uint32))
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    return -jnp.log(-jnp.log(uniform))


def sample(
    logits: Array,
    positions: Array,
    seeds: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
) -> Array:
    """A token for each row of logits f32 [B, V], by options [B]; temperature 0 is greedy.

    `positions` is where the token will stand. Of the tokens as likely as the last one that a
    filter keeps, all are kept.
    """
    V = logits.shape[-1]
    random = temperature > 0
    scaled = logits / jnp.where(random, temperature, 1.0)[:, None]
    ranked = -jnp.sort(-scaled, axis=-1)

    # The top_k likeliest; of these, the fewest whose mass reaches top_p.
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V)[:, None]
    kept = jnp.arange(V) < k
    mass = softmax(jnp.where(kept, ranked, -3.0e38))
    before = jnp.cumsum(mass, axis=-1) - mass
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    last = jnp.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
    threshold = jnp.take_along_axis(ranked, last, axis=1)  # [B, 1]

    # Those at least min_p times as likely as the likeliest.
    floor = ranked[:, :1] + jnp.log(jnp.maximum(min_p, 1e-30))[:, None]
    keep = (scaled >= threshold) & (scaled >= floor)

    noisy = jnp.where(keep, scaled + gumbel(seeds, positions, V), -3.0e38)
    choice = jnp.where(random, jnp.argmax(noisy, axis=-1), jnp.argmax(logits, axis=-1))
    return choice.astype(jnp.int32)
