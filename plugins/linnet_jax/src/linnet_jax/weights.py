"""From a bound model's parameters to JAX arrays on a device, one at a time."""

from collections.abc import Mapping

import jax

from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundParameter, read_parameter


def read_weights(
    program: Program,
    parameters: Mapping[str, BoundParameter],
    dtype: DType,
    device: jax.Device,
) -> dict[str, jax.Array]:
    """Every stored parameter of the program by path; a tied one is not among them.

    Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity.
    """
    return {
        p.path: jax.device_put(read_parameter(p, parameters, dtype), device)
        for p in program.parameters
        if p.tied_to is None
    }
