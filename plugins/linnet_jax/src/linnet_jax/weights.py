"""From a bound model's parameters to JAX arrays on a device, one at a time."""

import jax
import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast


def read_weights(model: BoundModel, dtype: DType, device: jax.Device) -> dict[str, jax.Array]:
    """Every stored parameter by path; a tied one is not among them.

    Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity.
    """
    arrays = {}
    for path, parameter in model.parameters.items():
        values = cast(parameter.read(), dtype, path)
        _check_finite(values, path)
        arrays[path] = jax.device_put(values, device)
    return arrays


def _check_finite(values: Array, path: str) -> None:
    """By the exponent's bits, which is fast in every float dtype."""
    exponent = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[values.dtype.name]
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    lost = 0
    for start in range(0, bits.size, 1 << 20):
        lost += int(((bits[start : start + (1 << 20)] & exponent) == exponent).sum())
    if lost:
        raise CheckpointError(
            f"{path}: {lost} of {values.size} values are not finite: the checkpoint is damaged; "
            "fetch it again"
        )
