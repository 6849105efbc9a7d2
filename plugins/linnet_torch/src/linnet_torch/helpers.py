"""The helpers that generated files begin with: each file gets a copy of those it calls.

This module is read as text, name by name; see ``linnet_torch.source``. So every definition here
stands on its own, on PyTorch and on other definitions of this module.
"""

# ruff: noqa: N806 - sizes are written as in shapes: B, S, H, D

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Tree = SimpleNamespace


def nest(flat: dict[str, Tensor]) -> Tree:
    """{"layers.0.norm.weight": tensor} as a tree: tree.layers[0].norm.weight."""
    branches: dict[str, dict[str, Tensor]] = {}
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        name, _, rest = path.partition(".")
        if rest:
            branches.setdefault(name, {})[rest] = tensor
        else:
            tree[name] = tensor
    for name, branch in branches.items():
        if all(path.partition(".")[0].isdecimal() for path in branch):
            inner = vars(nest({f"_{path}": tensor for path, tensor in branch.items()}))
            count = 1 + max(int(key[1:]) for key in inner)
            tree[name] = [inner.get(f"_{i}") for i in range(count)]
        else:
            tree[name] = nest(branch)
    return Tree(**tree)


def join(flat: dict[str, Tensor], at: str, parts: tuple[str, ...], whole: str) -> None:
    """Lay weights that multiply the same input one below the other: one product for all."""
    flat[f"{at}.{whole}"] = torch.cat([flat.pop(f"{at}.{part}") for part in parts])


@functools.cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Literal values, copied to a device once."""
    return torch.tensor(values, dtype=dtype, device=device)


class Slots(NamedTuple):
    """Where a call writes to the caches [R, T + 1, ...], and what it reads back.

    The last position of a cache row takes what padding and idle rows write; it is never read.
    """

    write: tuple[slice | Tensor, slice | Tensor]
    read: tuple[slice | Tensor, slice]


def cache_slots(
    starts: Tensor,
    lengths: Tensor,
    size: int,
    rows: Tensor | slice,
    *,
    start: int | None = None,
    end: int,
) -> Slots:
    """`size` tokens for each of `rows`: the first lengths[b] go to positions from starts[b] on.

    `start` is given where every row starts there and has all its tokens: then slices will do.
    """
    read = (rows, slice(0, end))
    if start is not None:
        return Slots((rows, slice(start, start + size)), read)
    if isinstance(rows, slice):
        rows = torch.arange(rows.start or 0, (rows.start or 0) + len(starts), device=starts.device)
    token = torch.arange(size, device=starts.device)
    real = token < lengths[:, None]
    positions = torch.where(real, starts[:, None] + token, -1)  # [B, S]
    return Slots((rows[:, None].long(), positions.long()), read)


def update(cache: Tensor, x: Tensor, slots: Slots) -> Tensor:
    """Write x [B, S, ...] to a cache in place; what attention reads, [B, end, ...]."""
    cache[slots.write] = x
    return cache[slots.read]


class Visible(NamedTuple):
    """Which keys S queries see, of those at positions 0, 1, ... of their row."""

    keys: slice
    """The stretch of positions that any of them sees."""
    mask: Tensor | None
    """bool [B, 1, S, keys]; None: every key of the stretch."""
    causal: bool
    """Query s sees the first s + 1 keys of the stretch."""


def visible_keys(
    positions: Tensor, *, start: int | None = None, end: int, window: int | None = None
) -> Visible:
    """Queries at positions [B, S] see keys up to their own, at most `window` of them.

    `start` is given where every row's positions are start, start + 1, ..., end - 1.
    """
    size = positions.shape[1]
    if start is not None:
        positions = positions[:1]  # rows are alike
        if size == 1:
            return Visible(slice(0 if window is None else max(0, end - window), end), None, False)
        # A size that a compiler leaves free decides nothing.
        if start == 0 and (window is None or (isinstance(end, int) and window >= end)):
            return Visible(slice(0, end), None, True)
    # Padding and idle rows see something, too: what they give is not used, but is finite.
    query = positions.clamp(0, end - 1)[:, None, :, None]  # [B, 1, S, 1]
    key = torch.arange(end, device=positions.device)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    return Visible(slice(0, end), mask, False)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """Attention of q [B, S, H, D] to k and v [B, T, K, D]; H / K query heads share a key head."""
    B, S, H, D = q.shape
    k, v = (x[:, visible.keys].transpose(1, 2) for x in (k, v))  # [B, K, T, D]
    K = k.shape[1]
    if S == 1:  # the heads that share a key head become its queries: no key is read twice
        q = q.reshape(B, K, H // K, D)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.mask, scale=scale)
        return y.reshape(B, 1, H, -1)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=visible.mask,
        is_causal=visible.causal,
        scale=scale,
        enable_gqa=H != K,
    )
    return y.transpose(1, 2)  # [B, S, H, D]


def rope_table(
    positions: Tensor, frequencies: tuple[float, ...], scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [B, S] times N frequencies: f32 [B, S, N]."""
    angles = positions[..., None].float() * constant(frequencies, torch.float32, positions.device)
    return angles.cos() * scale, angles.sin() * scale


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dimension i of x [B, S, H, D] with dimension i + N, by tables [B, S, N], in f32."""
    N = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]  # [B, S, 1, N]
    first, second = x[..., :N].float(), x[..., N : 2 * N].float()
    parts = [first * cos - second * sin, second * cos + first * sin]
    if x.shape[-1] > 2 * N:
        parts.append(x[..., 2 * N :].float())
    return torch.cat(parts, dim=-1).to(x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K]: [..., N]."""
    if x.device.type != "cpu" or x.dtype is torch.float32:
        return F.linear(x, weight, bias)
    if x.numel() == x.shape[-1]:  # a CPU reads a weight faster for a vector than for one row
        y = weight.mv(x.reshape(-1))
        return (y if bias is None else y + bias).reshape(*x.shape[:-1], -1)
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return F.linear(x, weight, bias)
    # Without instructions for bf16 and f16, products of matrices take a sixth of the time in f32.
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Layer normalisation over the last axis, in f32."""
    return F.layer_norm(x, scale.shape, scale, bias, eps)


def take(x: Tensor, ids: Tensor, axis: int) -> Tensor:
    """x[i] along an axis for every i of `ids`; the axes before it are matched one to one."""
    lead = [torch.arange(size, device=x.device) for size in ids.shape[:axis]]
    index = [at.reshape(-1, *[1] * (ids.dim() - 1 - i)) for i, at in enumerate(lead)]
    return x[(*index, ids.long())]


def write(cache: Tensor, x: Tensor, slots: Slots) -> None:
    """Write x [B, S, ...] to a cache in place."""
    cache[slots.write] = x


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise f32 [B, vocab], hashed from seed, position and token id alone.

    The hash is MurmurHash3's 32-bit finalizer, here in 64-bit integers.
    """
    u32 = 0xFFFFFFFF

    def mix(h: Tensor) -> Tensor:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & u32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & u32
        return h ^ (h >> 16)

    row = mix(mix((seeds.long() + 0x9E3779B9) & u32) ^ (positions.long() & u32))  # [B]
    bits = mix(row[:, None] ^ torch.arange(vocab, device=seeds.device))  # [B, vocab]
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def sample(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """A token for each row of logits f32 [B, V], by options [B]; temperature 0 is greedy.

    `positions` is where the token will stand. Of the tokens as likely as the last one that a
    filter keeps, all are kept.
    """
    V = logits.shape[-1]
    random = temperature > 0
    scaled = logits / torch.where(random, temperature, 1.0)[:, None]
    ranked = scaled.sort(dim=-1, descending=True).values

    # The top_k likeliest; of these, the fewest whose mass reaches top_p.
    k = torch.where(top_k > 0, top_k.clamp(max=V), V)[:, None]
    kept = torch.arange(V, device=logits.device) < k
    mass = ranked.masked_fill(~kept, -3.0e38).softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    kept &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    threshold = ranked.gather(1, last)  # [B, 1]

    # Those at least min_p times as likely as the likeliest.
    floor = ranked[:, :1] + torch.log(min_p.clamp(min=1e-30))[:, None]
    keep = (scaled >= threshold) & (scaled >= floor)

    noisy = (scaled + gumbel(seeds, positions, V)).masked_fill(~keep, -3.0e38)
    return torch.where(random, noisy.argmax(dim=-1), logits.argmax(dim=-1)).int()
