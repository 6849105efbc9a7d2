"""Element types in NumPy, and casts that refuse to overflow.

bf16 is ``ml_dtypes``'s, imported when it is first needed: that takes longer than all else here.
"""

from functools import cache
from typing import Any

import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array

_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
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
_EXPONENT: dict[DType, np.unsignedinteger[Any]] = {
    DType.F64: np.uint64(0x7FF0_0000_0000_0000),
    DType.F32: np.uint32(0x7F80_0000),
    DType.BF16: np.uint16(0x7F80),
    DType.F16: np.uint16(0x7C00),
}
_LARGEST_BF16 = float.fromhex("0x1.fep127")

_IN_CACHE = 1 << 15  # elements whose temporaries stay in cache
_CHUNK = 1 << 20  # elements looked at together: temporaries stay at some MB


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's type for one of ours; bf16 is ``ml_dtypes.bfloat16``. KeyError for FLOAT."""
    return _bf16() if dtype is DType.BF16 else _NUMPY[dtype]


@cache
def _bf16() -> np.dtype[Any]:
    import ml_dtypes

    bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bf16


def dtype_of(numpy: np.dtype[Any]) -> DType:
    """Our type for one of NumPy's. Raises CheckpointError for a type we do not have."""
    numpy = np.dtype(numpy)
    if numpy.name == "bfloat16" and numpy == _bf16():
        return DType.BF16
    try:
        return _DTYPES[numpy]
    except KeyError:
        raise CheckpointError(f"no tensor of type {numpy} is supported") from None


def cast(array: Array, dtype: DType, name: str) -> Array:
    """``array`` in a float ``dtype``, the very same array if it is already.

    Raises CheckpointError, naming the tensor and how many values, if finite values would become
    infinite: a model with such weights is not the model that was asked for.
    """
    if dtype_of(array.dtype) is dtype:
        return array
    return _cast(array, dtype, name).view(numpy_dtype(dtype)).reshape(array.shape)


def raw_bytes(array: Array) -> Array:
    """The bytes of an array, u8 ``[nbytes]``: a view of it if it is contiguous, else of a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def cast_bytes(array: Array, dtype: DType, name: str) -> Array:
    """The bytes, u8 ``[nbytes]``, of what ``cast`` gives: for who writes them and no more.

    Finite f32 becomes bf16 without ``ml_dtypes``. Raises CheckpointError as ``cast`` does.
    """
    return raw_bytes(array if dtype_of(array.dtype) is dtype else _cast(array, dtype, name))


def finite(values: Array, name: str) -> Array:
    """The same values, of a float dtype.

    Raises CheckpointError, with how many they are, for NaN and infinity: of such weights no output
    would mean anything.
    """
    exponent = _EXPONENT[dtype_of(values.dtype)]
    bits = np.ascontiguousarray(values).reshape(-1).view(exponent.dtype)
    wrong = 0
    for start in range(0, bits.size, _CHUNK):
        wrong += int(((bits[start : start + _CHUNK] & exponent) == exponent).sum())
    if wrong:
        raise CheckpointError(
            f"{name} has {wrong} of {bits.size} values that are not finite: the checkpoint is "
            "damaged; fetch it again"
        )
    return values


def finite_cast(array: Array, dtype: DType, name: str) -> Array:
    """Another dtype's values, all finite. Raises CheckpointError as ``cast`` and ``finite`` do."""
    return finite(cast(array, dtype, name), name)


def _cast(array: Array, dtype: DType, name: str) -> Array:
    """Another dtype's values, flat; bf16 as its bits, u16."""
    source = dtype_of(array.dtype)
    if not dtype.is_float:
        raise CheckpointError(f"{name}: {source} is not cast to {dtype}: weights are floats")
    flat = np.ascontiguousarray(array).reshape(-1)
    result = np.empty(flat.shape, np.uint16 if dtype is DType.BF16 else numpy_dtype(dtype))
    may_overflow = _largest(source) > _largest(dtype)
    lost, infinite, largest = 0, 0, 0.0
    for start in range(0, flat.size, _CHUNK):
        before, after = flat[start : start + _CHUNK], result[start : start + _CHUNK]
        if dtype is DType.BF16 and source is DType.F32 and _round_to_bf16(before, after):
            continue
        after = after.view(numpy_dtype(dtype))
        with np.errstate(over="ignore", invalid="ignore"):
            after[:] = before
        if may_overflow and not np.isfinite(after).all():
            overflowed = np.isfinite(before) & ~np.isfinite(after)
            infinite += int((~np.isfinite(before)).sum())
            if overflowed.any():
                lost += int(overflowed.sum())
                largest = max(largest, float(np.abs(before[overflowed].astype(np.float64)).max()))
    if lost:
        fits = [t for t in (DType.BF16, DType.F32, DType.F64) if _largest(t) >= largest]
        already = f"; {infinite} more are infinite or NaN as stored" if infinite else ""
        raise CheckpointError(
            f"{name}: {lost} of {flat.size} values do not fit {dtype} (the largest is "
            f"{largest:g}, stored as {source}){already}; load it as {' or '.join(fits[:2])}"
        )
    return result


def _round_to_bf16(before: Array, after: Array) -> bool:
    """Round f32 to the bits of the nearest bf16, ties to even: twice as fast as ml_dtypes.

    False, with nothing done, where a value is not finite or may become so.
    """
    if not max(before.max(initial=0), -before.min(initial=0)) < _LARGEST_BF16:
        return False
    for start in range(0, before.size, _IN_CACHE):
        bits = before[start : start + _IN_CACHE].view(np.uint32)
        rounded = (bits >> 16) & 1
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        after[start : start + _IN_CACHE] = rounded
    return True


def _largest(dtype: DType) -> float:
    """The largest finite value of a type."""
    if dtype is DType.BF16:
        return _LARGEST_BF16
    if dtype.is_float:
        return float(np.finfo(numpy_dtype(dtype)).max)
    return 1.0 if dtype is DType.BOOL else float(np.iinfo(numpy_dtype(dtype)).max)
