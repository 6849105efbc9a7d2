"""Padding what a call brings to one of few shapes, so that few programs are ever compiled.

A prompt's length is padded to the next of 16, 24, 32, 48, 64, ..., its rows to a power of two.
``end``, how much of the caches is read, is a power of two from 256 on, or all of it; a prompt that
starts at 0 reads what it has written.
"""

from collections.abc import Mapping

import numpy as np

from linnet.weights.checkpoint import Array


def next_size(size: int, most: int) -> int:
    """The next of 16, 24, 32, 48, ..., at most ``most``; 1 is 1."""
    if size <= 1:
        return size
    power = 16
    while size > power:
        if size <= power + power // 2:
            power += power // 2
            break
        power *= 2
    return min(power, most)


def next_power(size: int, least: int, most: int) -> int:
    """The next power of two from ``least`` on, at most ``most``."""
    power = least
    while power < size:
        power *= 2
    return min(power, most)


def pad(
    inputs: Mapping[str, Array], rows: int, max_seq: int
) -> tuple[dict[str, Array], int | None, tuple[slice, ...]]:
    """The inputs padded, ``end`` where states are read, and where in the result the answer is.

    Rows of padding have no tokens: nothing of them is written.
    """
    arrays = dict(inputs)
    if "positions" in arrays:  # one token for every cache row: nothing to pad
        return arrays, next_power(int(arrays["positions"].max()) + 1, 256, max_seq), (slice(None),)
    tokens = arrays["tokens"]
    end = None
    if "lengths" in arrays:
        size = int(arrays["lengths"].max())
        length = next_size(size, max_seq)
        last = int((arrays["starts"] + arrays["lengths"]).max())
        whole = not arrays["starts"].any()
        end = length if whole else next_power(max(last, length), 256, max_seq)
        batch = next_power(len(tokens), 1, rows)
    else:
        length = next_power(tokens.shape[1], 1, 1 << 30)
        if length > 16:
            length = next_size(tokens.shape[1], 1 << 30)
        size, batch = tokens.shape[1], next_power(len(tokens), 1, 1 << 30)
    answer = (slice(0, len(tokens)), slice(0, size))[: 1 if end is not None else 2]
    arrays["tokens"] = np.pad(
        tokens[:, :size], ((0, batch - len(tokens)), (0, length - min(size, tokens.shape[1])))
    )
    for name, array in arrays.items():
        if name != "tokens":
            arrays[name] = np.pad(array, (0, batch - len(array)))
    return arrays, end, answer
