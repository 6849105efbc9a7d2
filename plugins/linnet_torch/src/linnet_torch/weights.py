"""From a bound model's parameters to torch tensors, one at a time, each to its place."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from linnet.errors import CheckpointError
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundParameter
from linnet.weights.dtypes import cast

DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def fill(place: torch.Tensor, parameter: BoundParameter, dtype: DType) -> None:
    """Put a parameter's values, cast to ``dtype``, in their place.

    Raises CheckpointError for values that the dtype cannot hold, and for NaN or infinity, of which
    no token that comes out would mean anything.
    """
    values = cast(parameter.read(), dtype, parameter.path)
    tensor = place if place.device.type == "cpu" else torch.empty_like(place, device="cpu")
    if dtype is DType.BF16:  # which NumPy knows as the bits alone
        np.copyto(tensor.view(torch.int16).numpy(), values.view(np.int16))
    else:
        np.copyto(tensor.numpy(), values)
    # The extremes show NaN and infinity without a temporary of the tensor's size.
    if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
        lost = tensor.numel() - int(torch.isfinite(tensor).sum())
        raise CheckpointError(
            f"{parameter.path}: {lost} of {tensor.numel()} values are not finite: the checkpoint "
            "is damaged; fetch it again"
        )
    if tensor is not place:
        place.copy_(tensor)


def read_weights(
    program: Program,
    parameters: Mapping[str, BoundParameter],
    dtype: DType,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Every parameter of the program by path; a tied one is the very tensor it is tied to.

    On a CPU they lie in one block, in the order of the program: large enough for NumPy to ask for
    huge pages, which are read a fifth faster than small ones.
    """
    own = [p for p in program.parameters if p.tied_to is None]
    places = _block([p.shape for p in own], DTYPES[dtype], device)
    tensors: dict[str, torch.Tensor] = {}
    for parameter, tensor in zip(own, places, strict=True):
        parts = parameter.tensors
        rows = [parameters[part].shape[0] for part in parts] if parameter.parts else [len(tensor)]
        for part, place in zip(parts, torch.split(tensor, rows), strict=True):
            fill(place, parameters[part], dtype)
        tensors[parameter.path] = tensor
    for parameter in program.parameters:
        if parameter.tied_to is not None:
            tensors[parameter.path] = tensors[parameter.tied_to]
    return tensors


def _block(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Tensors of these shapes side by side, each on a cache line of its own."""
    sizes = [math.prod(shape) for shape in shapes]
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
    line = 64 // dtype.itemsize
    starts = [0, *itertools.accumulate(-(-size // line) * line for size in sizes)]
    block = torch.from_numpy(np.empty(starts[-1] * dtype.itemsize + 64, np.uint8))
    first = -block.data_ptr() % 64
    flat = block[first : first + starts[-1] * dtype.itemsize].view(dtype)
    return [
        flat[start : start + size].view(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]
