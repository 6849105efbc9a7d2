"""Element types in NumPy, and casts that refuse to overflow."""

from typing import Any

import ml_dtypes
import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
_DTYPES = {numpy: dtype for dtype, numpy in _NUMPY.items()}

_CHUNK = 1 << 22  # elements cast at a time: temporaries stay at some tens of MB


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's type for one of ours; bf16 is ``ml_dtypes.bfloat16``. KeyError for FLOAT."""
    return _NUMPY[dtype]


def dtype_of(numpy: np.dtype[Any]) -> DType:
    """Our type for one of NumPy's. Raises CheckpointError for a type we do not have."""
    try:
        return _DTYPES[np.dtype(numpy)]
    except KeyError:
        raise CheckpointError(f"no tensor of type {numpy} is supported") from None


def cast(array: Array, dtype: DType, name: str) -> Array:
    """``array`` in ``dtype``, the very same array if it is already.

    Raises CheckpointError, naming the tensor and how many values, if finite values would become
    infinite: a model with such weights is not the model that was asked for.
    """
    source = dtype_of(array.dtype)
    if source is dtype:
        return array
    flat = np.ascontiguousarray(array).reshape(-1)
    result = np.empty(flat.shape, numpy_dtype(dtype))
    narrowing = source.is_float and dtype.is_float and source.itemsize >= dtype.itemsize
    lost, largest = 0, 0.0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        with np.errstate(over="ignore"):
            result[start : start + _CHUNK] = part.astype(result.dtype)
        if narrowing and not np.isfinite(result[start : start + _CHUNK]).all():
            overflowed = np.isfinite(part) & ~np.isfinite(result[start : start + _CHUNK])
            if overflowed.any():
                lost += int(overflowed.sum())
                largest = max(largest, float(np.abs(part[overflowed].astype(np.float64)).max()))
    if lost:
        raise CheckpointError(
            f"{name}: {lost} of {flat.size} values do not fit {dtype} (the largest is "
            f"{largest:g}, stored as {source}); load it as bf16 or f32"
        )
    return result.reshape(array.shape)
