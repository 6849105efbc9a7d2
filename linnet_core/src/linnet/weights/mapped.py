"""Memory maps that count as memory until they are let go of.

The pages of a mapped file that were read stay in this process's resident size. Whoever streams a
checkpoint larger than memory gives back what it has read.
"""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from linnet.weights.checkpoint import Array


class OneAtATime:
    """Wraps readers of tensors so that each lets go of the pages of the one read before it.

    Only for callers that keep no tensor while they read the next.
    """

    def __init__(self) -> None:
        self._last: Array | None = None

    def reading(self, read: Callable[[], Array]) -> Callable[[], Array]:
        """``read``, after letting go of what was read last."""

        def streamed() -> Array:
            self.close()
            self._last = read()
            return self._last

        return streamed

    def close(self) -> None:
        """Let go of what was read last."""
        if self._last is not None:
            release(self._last)
        self._last = None


def release(array: Array) -> None:
    """Give the pages behind a view of a memory map back to the system; others are left alone.

    The values stay readable: they come from the file again.
    """
    found = _map_of(array)
    if found is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = array.ctypes.data - np.frombuffer(found, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    found.madvise(mmap.MADV_DONTNEED, first, start + array.nbytes - first)


def _map_of(array: Array) -> mmap.mmap | None:
    """The map that an array is a contiguous view of."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if not array.flags.c_contiguous:
            return None
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None
