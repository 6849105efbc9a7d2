"""Tensor types: element types, dimensions, and the two together.

Knows nothing of values: no NumPy here, so that importing it costs nothing.
"""

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """An element type.

    ``FLOAT`` is the run's own dtype: a program is written once, and f32, bf16 or f16 is chosen
    when it is loaded. Whatever must stay in f32 in every run says ``F32``. ``U32`` is there for
    hashing; a backend without it may compute in a wider integer and mask.
    """

    FLOAT = "float"
    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self in _FLOATS

    @property
    def itemsize(self) -> int:
        """Bytes of one element; ``FLOAT`` has none until a run chooses it."""
        if self is DType.FLOAT:
            raise ValueError("the run's dtype has no size until a run chooses it")
        return _SIZES[self]


_FLOATS = {DType.FLOAT, DType.F64, DType.F32, DType.F16, DType.BF16}
_SIZES = {
    DType.F64: 8,
    DType.I64: 8,
    DType.U64: 8,
    DType.F32: 4,
    DType.I32: 4,
    DType.U32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.I16: 2,
    DType.U16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
}

Dim = int | str
"""A size: a number when the config fixes it, a name (``"B"``) when it varies at run time."""


@dataclass(frozen=True)
class TensorType:
    """An element type and a shape, printed as ``float[B, S, 576]``."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)
