"""From a bound model's parameters to torch tensors, one at a time, straight to their place."""

from collections.abc import Mapping

import numpy as np
import torch

from linnet.errors import CheckpointError
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundParameter
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast

DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def tensor_of(array: Array, *, owned: bool) -> torch.Tensor:
    """A tensor with an array's values: the array's own memory where we own it, else a copy.

    What a file is mapped to is never used in place: it changes when the file does.
    """
    bf16 = array.dtype.name == "bfloat16"
    raw = array.view(np.int16) if bf16 else array
    if not owned or not raw.flags.writeable or not raw.flags.c_contiguous:
        raw = np.array(raw, order="C")
    tensor = torch.from_numpy(raw)
    return tensor.view(torch.bfloat16) if bf16 else tensor


def read_tensor(parameter: BoundParameter, dtype: DType, device: torch.device) -> torch.Tensor:
    """One parameter. Raises CheckpointError for values that the dtype cannot hold, and for NaN or
    infinity, of which no token that comes out would mean anything.
    """
    stored = parameter.read()
    converted = cast(stored, dtype, parameter.path)
    tensor = tensor_of(converted, owned=converted is not stored)
    # The extremes show NaN and infinity without a temporary of the tensor's size.
    if tensor.numel() and not all(map(torch.isfinite, tensor.aminmax())):
        lost = tensor.numel() - int(torch.isfinite(tensor).sum())
        raise CheckpointError(
            f"{parameter.path}: {lost} of {tensor.numel()} values are not finite: the checkpoint "
            "is damaged; fetch it again"
        )
    return tensor.to(device)


def read_weights(
    program: Program,
    parameters: Mapping[str, BoundParameter],
    dtype: DType,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Every parameter of the program by path; a tied one is the very tensor it is tied to.

    A joined one is filled part by part: no more than one part is there twice at a time.
    """
    tensors: dict[str, torch.Tensor] = {}
    for parameter in program.parameters:
        if parameter.tied_to is not None:
            continue
        if not parameter.parts:
            tensors[parameter.path] = read_tensor(parameters[parameter.path], dtype, device)
            continue
        whole = torch.empty(parameter.shape, dtype=DTYPES[dtype], device=device)
        start = 0
        for part in parameter.parts:
            tensor = read_tensor(parameters[part], dtype, device)
            whole[start : start + len(tensor)] = tensor
            start += len(tensor)
        tensors[parameter.path] = whole
    for parameter in program.parameters:
        if parameter.tied_to is not None:
            tensors[parameter.path] = tensors[parameter.tied_to]
    return tensors
