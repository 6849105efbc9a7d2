"""Deciding whether two parameters are one: from the tensors, checked against the config's flag."""

import numpy as np

from linnet.errors import BindingError
from linnet.weights.checkpoint import Checkpoint, StoredTensor
from linnet.weights.dtypes import raw_bytes

_CHUNK = 1 << 24  # bytes compared at a time


def is_tied(
    checkpoint: Checkpoint,
    *,
    parameter: str,
    tied_to: str,
    flag: bool | None,
    prefix: str = "model.",
) -> tuple[bool, str | None]:
    """Whether ``parameter`` shares the values of ``tied_to``, and a note if that needs saying.

    The flag is the config's ``tie_word_embeddings``; None where it does not state it. ``prefix``
    is what a file may leave off its names. Raises BindingError where flag and tensors contradict
    each other. Values are read only when both are stored and the flag says that they are one.
    """
    head, embedding = (_find(checkpoint, path, prefix) for path in (parameter, tied_to))
    if head is None:
        if flag is False:
            raise BindingError(
                f"the config says that {parameter} is not tied (tie_word_embeddings is false), "
                "but the checkpoint has no such tensor; set it to true if the model ties them"
            )
        if flag is None:
            return True, f"no {parameter} and no tie_word_embeddings: taken as tied to {tied_to}"
        return True, None
    if flag is None:
        return False, f"no tie_word_embeddings: untied, since the checkpoint has {parameter}"
    if flag is False:
        return False, None
    if embedding is None:
        raise BindingError(
            f"{parameter} is tied to {tied_to} (tie_word_embeddings is true), but the checkpoint "
            f"stores the values as {head.name}; rename that tensor to {tied_to}"
        )
    if not _equal(head, embedding):
        raise BindingError(
            f"the config says that {parameter} is tied to {tied_to} (tie_word_embeddings is "
            f"true), but the checkpoint has both and they differ: {_type(head)} and "
            f"{_type(embedding)}; set it to false to use both"
        )
    return True, f"{parameter} is stored as well as {tied_to}, with equal values"


def _find(checkpoint: Checkpoint, path: str, prefix: str) -> StoredTensor | None:
    """A tensor by its path, or by its path without the model's prefix."""
    return checkpoint.tensors.get(path) or checkpoint.tensors.get(path.removeprefix(prefix))


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Equal to the bit: NaNs and the sign of zero included."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = raw_bytes(one.read()), raw_bytes(other.read())
    return all(
        np.array_equal(a[start : start + _CHUNK], b[start : start + _CHUNK])
        for start in range(0, a.size, _CHUNK)
    )


def _type(tensor: StoredTensor) -> str:
    return f"{tensor.name} {tensor.dtype}{list(tensor.shape)}"
