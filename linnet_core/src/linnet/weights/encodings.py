"""How a family's checkpoints hold a parameter otherwise than its program has it.

A norm stored as its difference from one, a linear stored as inputs by outputs: what a family names
here is undone when a checkpoint is bound, and done when a random one is written. Exporters carry
over what the checkpoint holds, so nothing is rounded on the way through.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, StoredTensor
from linnet.weights.dtypes import numpy_dtype


@dataclass(frozen=True)
class Encoding:
    """Both ways between a file's tensor and the program's parameter.

    ``decode`` gives the tensor in the program's layout, its values read when they are asked for;
    ``encode`` gives a parameter's values as the file holds them.
    """

    name: str
    decode: Callable[[StoredTensor], StoredTensor]
    encode: Callable[[Array], Array]


def _scale(tensor: StoredTensor) -> StoredTensor:
    # In f32, whatever it is stored in: that is where Transformers adds the one.
    wide = tensor.dtype if tensor.dtype is DType.F64 else DType.F32
    one, kind = np.ones((), numpy_dtype(wide)), numpy_dtype(wide)
    return replace(tensor, dtype=wide, read=lambda: tensor.read().astype(kind) + one)


def _transposed(tensor: StoredTensor) -> StoredTensor:
    return replace(
        tensor, shape=tensor.shape[::-1], read=lambda: np.ascontiguousarray(tensor.read().T)
    )


FROM_ONE = Encoding("difference from one", _scale, lambda values: values - values.dtype.type(1))
"""A scale stored as what it differs from one by, as Gemma's norms are."""
TRANSPOSED = Encoding("transposed", _transposed, lambda values: np.ascontiguousarray(values.T))
"""A linear's weight stored as ``[inputs, outputs]``, as GPT-2's are."""

Encodings = Mapping[str, Encoding]
"""By patterns of parameter paths; a path that none matches is stored as it is."""


def encoding_of(path: str, encodings: Encodings) -> Encoding | None:
    """How a parameter is stored, None for as it is."""
    return next((e for pattern, e in encodings.items() if re.fullmatch(pattern, path)), None)


def encoded(path: str, values: Array, encodings: Encodings) -> Array:
    """A parameter's values as the family's files hold them."""
    encoding = encoding_of(path, encodings)
    return values if encoding is None else encoding.encode(values)


def stored_shape(path: str, shape: tuple[int, ...], encodings: Encodings) -> tuple[int, ...]:
    """The shape that a parameter of ``shape`` has in the family's files."""
    encoding = encoding_of(path, encodings)
    empty = StoredTensor(path, shape, DType.F32, lambda: np.empty(shape, np.float32))
    return shape if encoding is None else encoding.decode(empty).shape
