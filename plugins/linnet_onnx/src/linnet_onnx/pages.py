"""Huge pages for weights that ONNX Runtime packs into memory of its own, on Linux.

What every step reads is read faster from pages of 2 MiB than from those of 4 KiB. Where the system
gives huge pages on request only, as most do, ONNX Runtime does not ask; so they are asked for once
its weights are there, and the system copies them over.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

HUGE = 2 << 20
"""Bytes of a huge page, with base pages of 4 KiB."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COLLAPSE = 25
"""MADV_COLLAPSE of linux/mman.h, since Linux 6.1: now, and not some day in the background."""

Ranges = list[tuple[int, int]]


def anonymous_memory() -> Ranges:
    """From where to where this process has writable memory that is of no file, in order.

    Empty where the system does not say so: anywhere but on Linux, or without ``/proc``.
    """
    try:
        lines = Path("/proc/self/maps").read_bytes().splitlines()
    except OSError:
        return []
    ranges = []
    for line in lines:
        place, rights, _, _, inode, *name = line.split()
        if rights == b"rw-p" and inode == b"0" and name in ([], [b"[heap]"]):
            start, end = (int(number, 16) for number in place.split(b"-"))
            ranges.append((start, end))
    return ranges


def added(after: Sequence[tuple[int, int]], before: Sequence[tuple[int, int]]) -> Ranges:
    """The parts of ``after`` that are not in ``before``; both are in order."""
    parts = []
    for start, end in after:
        fresh = start
        for known_start, known_end in before:
            if known_end <= fresh or end <= known_start:
                continue
            if fresh < known_start:
                parts.append((fresh, known_start))
            fresh = known_end
        if fresh < end:
            parts.append((fresh, end))
    return parts


def use_huge_pages(ranges: Sequence[tuple[int, int]]) -> int:
    """Put what is in memory there into huge pages; how many bytes are in such pages then.

    What the system refuses, or does not know of, stays as it is: the values are the same. Nothing
    is asked of a system whose huge pages are turned off.
    """
    if not ranges or _turned_off():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    total = 0
    for start, end in ranges:
        # One after the other: at one that it cannot have, the system leaves the rest as it is.
        for page in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
            if madvise(page, HUGE, COLLAPSE) == 0:
                total += HUGE
    return total


def _turned_off() -> bool:
    try:
        return "[never]" in SETTING.read_text()
    except OSError:
        return True
