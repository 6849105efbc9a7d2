"""Helpers in place of those of ``helpers.py``, for a step of one token a row on a CPU.

The operators of ``kernels.cpp`` read a cache only as far as a row's position, so nothing here
depends on how much of it is in use: one compiled step serves every position. Read as text, as
``helpers.py`` is.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where a step writes to the caches [R, T + 1, ...]; idle rows write to the last position."""

    rows: Tensor
    positions: Tensor


def cache_slots(
    starts: Tensor, lengths: Tensor, size: int, rows: Tensor | slice, *, end: int
) -> Slots:
    """One token for each row, at its position; a row of length 0 is idle."""
    positions = torch.where(lengths > 0, starts, -1).long()
    return Slots(torch.arange(len(starts), device=starts.device), positions)


def update(cache: Tensor, x: Tensor, slots: Slots) -> Tensor:
    """Write x [R, 1, ...] to a cache in place; the whole of it."""
    cache[slots.rows, slots.positions] = x.squeeze(1)
    return cache


class Visible(NamedTuple):
    """A row at position p sees keys up to p, at most `window` of them; idle rows see none."""

    positions: Tensor
    window: int | None


def visible_keys(positions: Tensor, *, end: int, window: int | None = None) -> Visible:
    """What queries at positions [R, 1] see."""
    return Visible(positions.squeeze(1), window)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> Tensor:
    """Attention of q [R, 1, H, D] to k and v [R, T, K, D]; H / K query heads share a key head."""
    y: Tensor = torch.ops.linnet.attend(q, k, v, visible.positions, scale, visible.window)
    return y
