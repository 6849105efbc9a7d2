"""From a bound model's parameters to JAX arrays on a device, one at a time."""

from collections.abc import Mapping

import jax
import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundParameter
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast


def read_weights(
    program: Program,
    parameters: Mapping[str, BoundParameter],
    dtype: DType,
    device: jax.Device,
) -> dict[str, jax.Array]:
    """Every stored parameter of the program by path; a tied one is not among them.

    Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity.
    """
    arrays = {}
    for parameter in program.parameters:
        if parameter.tied_to is None:
            paths = parameter.parts or (parameter.path,)
            parts = [_read(parameters[path], dtype) for path in paths]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            arrays[parameter.path] = jax.device_put(whole, device)
    return arrays


def _read(parameter: BoundParameter, dtype: DType) -> Array:
    values = cast(parameter.read(), dtype, parameter.path)
    _check_finite(values, parameter.path)
    return values


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
