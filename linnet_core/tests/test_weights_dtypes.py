"""Casts keep every bit they can, and refuse to make infinities."""

import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast, cast_bytes, dtype_of, numpy_dtype

STORED = [dtype for dtype in DType if dtype is not DType.FLOAT]
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)


def bf16(*values: float) -> Array:
    return np.array(values, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", STORED)
def test_types_match_numpy(dtype: DType) -> None:
    assert dtype_of(numpy_dtype(dtype)) is dtype
    assert numpy_dtype(dtype).itemsize == dtype.itemsize


def test_what_bf16_needs_is_not_imported_for_other_types() -> None:
    code = (
        "import sys, numpy as np; from linnet.spec.types import DType\n"
        "from linnet.weights.dtypes import cast, numpy_dtype\n"
        "cast(np.ones(3, np.float32), DType.F16, 'w')\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "numpy_dtype(DType.BF16)\n"
        "assert 'ml_dtypes' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_types_nobody_has() -> None:
    with pytest.raises(CheckpointError, match="complex64"):
        dtype_of(np.dtype(np.complex64))
    with pytest.raises(CheckpointError, match=">f4"):
        dtype_of(np.dtype(">f4"))
    with pytest.raises(CheckpointError, match="bfloat16"):
        dtype_of(np.dtype([("bfloat16", np.float32)]))
    with pytest.raises(KeyError):
        numpy_dtype(DType.FLOAT)


@pytest.mark.parametrize("dtype", STORED)
def test_the_same_type_is_the_same_array(dtype: DType) -> None:
    values = np.zeros((2, 3), numpy_dtype(dtype)).T
    assert cast(values, dtype, "w") is values


def test_bf16_survives_f32_bit_by_bit() -> None:
    values = ALL_BITS.view(ml_dtypes.bfloat16).reshape(256, 256)
    wide = cast(values, DType.F32, "w")
    assert (wide.view(np.uint32) == ALL_BITS.astype(np.uint32).reshape(256, 256) << 16).all()
    back = cast(wide, DType.BF16, "w").view(np.uint16)
    exact = ~np.isnan(wide)
    assert (back == values.view(np.uint16))[exact].all()
    assert back[0, 1] == 0x0001, "the smallest subnormal is not flushed"


def test_f16_survives_f32_and_f64() -> None:
    values = ALL_BITS.view(np.float16)
    for dtype in (DType.F32, DType.F64):
        back = cast(cast(values, dtype, "w"), DType.F16, "w")
        assert np.array_equal(back, values, equal_nan=True)


def test_overflow_is_counted_and_refused() -> None:
    values = np.ones((48, 80), ml_dtypes.bfloat16)
    values[3, 7], values[40, 0] = -75000, 70000
    with pytest.raises(CheckpointError) as caught:
        cast(values, DType.F16, "model.layers.0.mlp.down_proj.weight")
    assert str(caught.value) == (
        "model.layers.0.mlp.down_proj.weight: 2 of 3840 values do not fit f16 (the largest is "
        "74752, stored as bf16); load it as bf16 or f32"
    )
    assert cast(values, DType.F32, "w")[3, 7] == -74752


@pytest.mark.parametrize(
    ("values", "dtype", "advice"),
    [
        (np.array([65520.0], np.float32), DType.F16, "load it as bf16 or f32"),
        (np.array([3.4e38], np.float32), DType.F16, "load it as f32 or f64"),
        (np.array([3.4e38], np.float32), DType.BF16, "load it as f32 or f64"),
        (np.array([1e300]), DType.F32, "load it as f64"),
        (np.array([70000]), DType.F16, "load it as bf16 or f32"),
        (np.array([65535], np.uint16), DType.F16, "load it as bf16 or f32"),
    ],
)
def test_what_does_not_fit(values: Array, dtype: DType, advice: str) -> None:
    with pytest.raises(CheckpointError, match=f"1 of 1 values do not fit {dtype}.*{advice}$"):
        cast(values, dtype, "w")


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([65519.0], np.float32), DType.F16, 65504),
        (np.array([3.389e38], np.float32), DType.BF16, float(ml_dtypes.finfo("bfloat16").max)),
        (np.array([-128], np.int8), DType.F16, -128),
        (np.array([True]), DType.BF16, 1),
    ],
)
def test_what_just_fits(values: Array, dtype: DType, expected: float) -> None:
    assert cast(values, dtype, "w").astype(np.float64).tolist() == [expected]


def test_infinite_values_stay_and_are_told_from_those_that_became_so() -> None:
    values = bf16(1, np.inf, -np.inf, np.nan)
    assert str(cast(values, DType.F16, "w").tolist()) == "[1.0, inf, -inf, nan]"
    with pytest.raises(CheckpointError, match=r"1 of 5 values.*; 3 more are infinite"):
        cast(np.append(values, bf16(70000)), DType.F16, "w")


@pytest.mark.parametrize("dtype", [d for d in STORED if not d.is_float])
def test_weights_become_no_integers(dtype: DType) -> None:
    with pytest.raises(CheckpointError, match=f"w: f32 is not cast to {dtype}"):
        cast(np.ones(2, np.float32), dtype, "w")


def test_shapes_are_kept() -> None:
    for shape in [(), (0,), (2, 0), (3, 4)]:
        assert cast(np.ones(shape, np.float32), DType.F16, "w").shape == shape
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    assert cast(turned, DType.BF16, "w").astype(np.float32).tolist() == turned.tolist()


def test_casting_takes_little_more_than_its_result() -> None:
    values = np.ones((16, 1 << 20), np.float32)
    values[15, -1] = 1e6
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="1 of 16777216"):
            cast(values, DType.F16, "w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (32 + 8) << 20


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=40))
def test_no_cast_makes_an_infinity(values: list[float]) -> None:
    array = np.array(values, np.float32)
    for dtype in (DType.F16, DType.BF16):
        with np.errstate(over="ignore"):
            expected = array.astype(numpy_dtype(dtype))
        if np.isfinite(expected).all():
            assert cast(array, dtype, "w").tobytes() == expected.tobytes()
        else:
            lost = int((~np.isfinite(expected)).sum())
            with pytest.raises(CheckpointError, match=f"w: {lost} of {len(values)} values"):
                cast(array, dtype, "w")


def test_rounding_to_bf16_is_that_of_ml_dtypes() -> None:
    """Any bits, ties, subnormals and both zeros; NaN and infinity go another way."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint64).astype(np.uint32)
    ties = (ALL_BITS.astype(np.uint32) << 16) | 0x8000
    values = np.concatenate([drawn, ties]).view(np.float32)
    values = values[np.abs(values) < 3.38e38]
    for some in (values, values[:0], values[:7]):
        expected = some.astype(ml_dtypes.bfloat16).view(np.uint16)
        assert np.array_equal(cast(some, DType.BF16, "w").view(np.uint16), expected)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("values", [[1.5, -2.25, 3e-5, 0.1], [1.5, np.inf, np.nan, -np.inf], []])
def test_the_bytes_are_those_of_the_cast(values: list[float], dtype: DType) -> None:
    stored = np.array(values, np.float32).reshape(2, -1)
    assert cast_bytes(stored, dtype, "w").tobytes() == cast(stored, dtype, "w").tobytes()
    with pytest.raises(CheckpointError, match="1 of 2 values do not fit f16"):
        cast_bytes(np.array([1, 1e9], np.float32), DType.F16, "w")
