"""Reading tensors: plain types as views of the file, blocks decoded to f32.

The arithmetic of the blocks is the ``gguf`` library's. Knows nothing of what a tensor is for.
"""

import mmap

import numpy as np

from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import numpy_dtype
from linnet_gguf.container import TensorInfo

CHUNK = 1 << 16
"""Numbers decoded at a time: large enough for NumPy, small enough that temporaries stay in cache
and add nothing to the peak."""


def read_tensor(data: mmap.mmap, info: TensorInfo, order: Array | None = None) -> Array:
    """A tensor of ``info.shape`` and ``info.encoding.dtype``; ``data`` is the whole file.

    ``order`` takes the rows of a matrix, or the entries of a vector, in another order: row i is
    the file's row ``order[i]``. A plain tensor in the file's order is a read-only view of it.
    """
    if info.encoding.is_plain:
        values = np.frombuffer(
            data, numpy_dtype(info.encoding.dtype), offset=info.offset,
            count=info.nbytes // info.encoding.block_bytes,
        ).reshape(info.shape)  # fmt: skip
        if order is not None:
            return values[order]
        return values if values.flags.aligned else values.copy()
    return _decode(data, info, order)


def _decode(data: mmap.mmap, info: TensorInfo, order: Array | None) -> Array:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    encoding = info.encoding
    kind = GGMLQuantizationType(encoding.number)
    if order is not None and len(info.shape) == 1:
        # Blocks run across what is to be reordered.
        return _decode(data, info, None)[order]
    width = info.shape[-1]
    stored = np.frombuffer(data, np.uint8, info.nbytes, info.offset)
    stored = stored.reshape(-1, width // encoding.block * encoding.block_bytes)
    result = np.empty((len(stored), width), np.float32)
    step = max(1, CHUNK // width)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(stored), step):
            rows = slice(start, start + step)
            chunk = stored[rows] if order is None else stored[order[rows]]
            # As one long row: the library works through 16 rows at a time otherwise.
            decoded = dequantize(chunk.reshape(1, -1), kind)
            result[rows] = decoded.reshape(-1, width)
    _forget(data, info)
    return result.reshape(info.shape)


def _forget(data: mmap.mmap, info: TensorInfo) -> None:
    """Let go of the file's pages, which would otherwise count as this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start = info.offset // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, start, info.offset + info.nbytes - start)
