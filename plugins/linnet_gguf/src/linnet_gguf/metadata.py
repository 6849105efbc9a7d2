"""Reading metadata strictly: values are typed, and what nobody read can be listed.

Knows nothing of which keys there are.
"""

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from linnet.errors import CheckpointError
from linnet.weights.checkpoint import Array
from linnet_gguf.container import Value

T = TypeVar("T", bool, int, float, str)


class Metadata:
    """A file's metadata; ``where`` names the file in errors. Remembers which keys were read."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self.values, self.where = values, where
        self.read: set[str] = set()

    def error(self, message: str) -> CheckpointError:
        """An error that names the file, to be raised."""
        return CheckpointError(f"{self.where}: {message}")

    def optional(self, key: str, type_: type[T]) -> T | None:
        """A scalar, or None where the file does not have the key. An int will do for a float."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            return None
        if type_ is float and type(value) is int:
            value = float(value)
        if type(value) is not type_:
            raise self.error(f"{key} is {shown(value)}, not of type {type_.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{key} is {value}, not a finite number")
        return value

    def required(self, key: str, type_: type[T]) -> T:
        """A scalar; CheckpointError where the file does not have the key."""
        value = self.optional(key, type_)
        if value is None:
            raise self.error(f"does not have the metadata key {key}: convert the model again")
        return value

    def size(self, key: str) -> int:
        """A required count of at least 1."""
        value = self.required(key, int)
        if value < 1:
            raise self.error(f"{key} is {value}, not a positive number")
        return value

    def same_for_all(self, key: str) -> int | None:
        """A count that some files give once and some for each layer; None where it is absent."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray):
            return self.optional(key, int)
        self.read.add(key)
        different = sorted(set(value.tolist()))
        if value.dtype.kind not in "iu" or len(different) != 1:
            raise self.error(
                f"{key} differs by layer ({shown(different)}), which this architecture's "
                "Transformers config cannot say"
            )
        return int(different[0])

    def strings(self, key: str) -> list[str] | None:
        """An array of strings, or None."""
        self.read.add(key)
        value = self.values.get(key)
        if isinstance(value, np.ndarray) and not value.size:
            return []  # Writers give an empty array any item type.
        if value is not None and not isinstance(value, list):
            raise self.error(f"{key} is {shown(value)}, not an array of strings")
        return value

    def numbers(self, key: str) -> Array | None:
        """An array of numbers, or None."""
        self.read.add(key)
        value = self.values.get(key)
        if value is not None and (
            not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf"
        ):
            raise self.error(f"{key} is {shown(value)}, not an array of numbers")
        return value

    def unread(self, prefix: str) -> list[str]:
        """Keys with the prefix that nobody asked for."""
        return sorted(k for k in self.values if k.startswith(prefix) and k not in self.read)


def shown(value: object) -> str:
    """A value for an error message, cut short."""
    text = str(value) if isinstance(value, np.ndarray) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
