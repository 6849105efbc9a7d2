"""Weights in blocks of 32 along a row, as ONNX Runtime's ``MatMulNBits`` reads them.

A value is ``(q - zero) * scale``, with one scale and one zero for each block: ``int8`` is symmetric
(its zero is 128, which is not stored), ``int4`` reaches from the least to the largest of a block.
Norms, biases and embeddings stay floats; beside ``int4``, the head, which decides most, is int8.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import onnx_ir as ir

from linnet.spec.program import Node
from linnet.weights.checkpoint import Array
from linnet_onnx.graph import MICROSOFT, Stored
from linnet_onnx.writer import Special, Writer

BLOCK = 32
BITS = {"int8": 8, "int4": 4}
ACCURACY = 4
"""Activations are multiplied as int8: what makes these products fast on a CPU."""


def encode(values: Array, bits: int) -> tuple[Array, Array, Array | None]:
    """f32 ``[N, K]`` as u8 ``[N, blocks, 32 * bits / 8]``, f32 scales ``[N, blocks]``, and packed
    u8 zeros ``[N, ...]`` where they are stored.
    """
    rows, width = values.shape
    count = -(-width // BLOCK)
    blocks = np.zeros((rows, count * BLOCK), np.float32)
    blocks[:, :width] = values
    blocks = blocks.reshape(rows, count, BLOCK)
    if bits == 8:
        scales = np.abs(blocks).max(-1) / 127
        zeros = np.full(scales.shape, 128, np.float32)
    else:
        least, most = (np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0))
        scales = most / 15 - least / 15  # the difference itself may be more than f32 holds
        zeros = np.rint(-least / np.where(scales == 0, 1, scales))
    steps = blocks / np.where(scales == 0, 1, scales)[..., None]
    codes = np.clip(np.rint(steps) + zeros[..., None], 0, 2**bits - 1).astype(np.uint8)
    scales = scales.astype(np.float32)
    if bits == 8:
        return codes, scales, None
    return _pairs(codes), scales, _pairs(zeros.astype(np.uint8))


def decode(codes: Array, scales: Array, zeros: Array | None, width: int) -> Array:
    """The f32 ``[N, width]`` that ``encode`` made these of, as near as they hold it."""
    if zeros is None:
        numbers = codes.astype(np.float32) - np.float32(128)
    else:
        numbers = _apart(codes).astype(np.float32)
        numbers -= _apart(zeros)[:, : scales.shape[1], None]
    with np.errstate(over="ignore", invalid="ignore"):  # scales of a damaged file
        numbers *= scales[..., None]
    return np.ascontiguousarray(numbers.reshape(len(codes), -1)[:, :width])


def _apart(pairs: Array) -> Array:
    return np.stack([pairs & 15, pairs >> 4], -1).reshape(*pairs.shape[:-1], -1)


def _pairs(codes: Array) -> Array:
    """Two 4-bit numbers in each byte, the first in the lower half."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], -1)
    return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def names(path: str, bits: int) -> tuple[str, ...]:
    """What the codes, scales and perhaps zeros of a matrix are called."""
    name = f"{path}.int{bits}"
    return (name, f"{name}.scales", f"{name}.zeros")[: 3 if bits == 4 else 2]


def matrix_of(name: str) -> tuple[str, int] | None:
    """Path and bits of the matrix whose codes are called so; None for other names."""
    found = re.fullmatch(r"(.+)\.int([48])", name)
    return None if found is None else (found[1], int(found[2]))


def product(encoding: str, head: str | None) -> Special:
    """The lowering of ``linear`` with its weight in blocks; ``head`` is the head's name."""

    def linear(w: Writer, node: Node, xs: Sequence[ir.Value]) -> Sequence[ir.Value]:
        x, weight, *bias = xs
        path = weight.name or ""
        g, result = w.graph, node.outputs[0].type
        n, k = (int(d) for d in node.inputs[1].type.shape)
        bits = 8 if path == head else BITS[encoding]
        parts = stored_parts(path, n, k, bits, lambda: w.weights.f32(path))
        operands = [x, *(g.weight(part) for part in parts)]
        y = g.op(
            "MatMulNBits",
            operands,
            x.dtype,
            result.shape,
            MICROSOFT,
            K=k,
            N=n,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=ACCURACY,
        )
        return [g.op("Add", [y, bias[0]], x.dtype, result.shape) if bias else y]

    return linear


def stored_parts(path: str, n: int, k: int, bits: int, read: Callable[[], Array]) -> list[Stored]:
    """Codes, scales and perhaps zeros of one matrix, encoded once for all of them."""
    count = -(-k // BLOCK)

    @cache
    def encoded() -> tuple[Array, Array, Array | None]:
        return encode(read(), bits)

    def part(place: int) -> Callable[[], Array]:
        last = 2 if bits == 4 else 1

        def read_part() -> Array:
            values = encoded()[place]
            assert values is not None
            if place == last:
                encoded.cache_clear()
            return values

        return read_part

    codes, scales, *zeros = names(path, bits)
    u8, f32 = ir.DataType.UINT8, ir.DataType.FLOAT
    stored = [
        Stored(codes, u8, (n, count, BLOCK * bits // 8), part(0)),
        Stored(scales, f32, (n, count), part(1)),
    ]
    return stored + [Stored(name, u8, (n, -(-count // 2)), part(2)) for name in zeros]
