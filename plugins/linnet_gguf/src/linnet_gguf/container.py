"""The GGUF container: metadata and a tensor directory, read from a file that nobody vouches for.

Every length is checked against the file before anything is allocated, and sizes are multiplied as
Python integers, which do not wrap. Knows nothing of architectures, tokenizers or dequantization.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet.errors import CheckpointError
from linnet.weights.checkpoint import Array
from linnet_gguf.encodings import ENCODINGS, UNSUPPORTED, Encoding

Value = bool | int | float | str | list[str] | Array
"""A metadata value. Arrays of numbers are views of the file; arrays of strings are lists."""

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_STRINGS = 1 << 22
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL, _FLOAT32 = 8, 9, 7, 6
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8",
    _FLOAT32: "<f4", 12: "<f8", _BOOL: "|b1",
}  # fmt: skip
"""Metadata value types by number, as NumPy spells them."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file. ``shape`` has the outermost axis first, as NumPy has it."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


@dataclass(frozen=True)
class Container:
    """A GGUF file whose header holds together. ``data`` is the whole file, read as it is used."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data: mmap.mmap


def read_container(path: Path) -> Container:
    """Read the header of a GGUF file.

    Raises CheckpointError for anything but a whole, little-endian GGUF file of version 2 or 3
    whose tensors follow one another without overlap or gap.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CheckpointError(f"{path} is empty")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    cursor = _Cursor(path, data)
    version = _version(cursor)
    tensor_count = cursor.count("tensors", MAX_TENSORS, least_bytes=8 + 4 + 8 + 4 + 8)
    key_count = cursor.count("metadata keys", MAX_KEYS, least_bytes=8 + 4 + 1)
    metadata = _metadata(cursor, key_count)
    tensors = _tensors(cursor, tensor_count, _alignment(cursor, metadata))
    return Container(path, version, metadata, tensors, data)


class _Cursor:
    """A place in the file, and reads that cannot leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def take(self, count: int, what: str) -> int:
        """Step over ``count`` bytes and say where they start."""
        start = self.at
        if count > self.size - start:
            raise self.error(
                f"{what} needs {count} bytes at byte {start}, but the file has {self.size}: it is "
                "damaged or was cut short; fetch it again"
            )
        self.at = start + count
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def count(self, what: str, most: int, least_bytes: int) -> int:
        """A count of things that follow, which must be able to fit."""
        count = self.u64(f"the number of {what}")
        if count > most:
            raise self.error(f"claims {count} {what}; at most {most} are read")
        if count * least_bytes > self.size - self.at:
            raise self.error(f"claims {count} {what}, more than its {self.size} bytes can hold")
        return count

    def string(self, what: str, most: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > most:
            raise self.error(f"{what} claims {length} bytes; at most {most} are read")
        start = self.take(length, what)
        return self.text(self.data[start : self.at], what)

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {raw[:40]!r}") from error

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings, in a loop of its own: vocabularies have 100,000s."""
        unpack, data, at, size = _U64.unpack_from, self.data, self.at, self.size
        raw: list[bytes] = []
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0] if start <= size else size + 1
            if at > size:
                self.take(size + 1, f"item {len(raw)} of {what}")
            raw.append(data[start:at])
        self.at = at
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError:
            return [self.text(item, f"item {i} of {what}") for i, item in enumerate(raw)]


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def _version(cursor: _Cursor) -> int:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise cursor.error(f"starts with {magic!r}, not b'GGUF': it is not a GGUF file")
    cursor.at = 4
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "is a big-endian GGUF file; only little-endian ones are read: convert it with "
            "`gguf-convert-endian FILE little`"
        )
    if version not in (2, 3):
        raise cursor.error(
            f"is GGUF version {version}; versions 2 and 3 are read: convert the model again with a "
            "current llama.cpp"
        )
    return version


def _metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"has the metadata key {key!r} twice")
        metadata[key] = _value(cursor, key, cursor.u32(f"the type of {key}"))
    return metadata


def _value(cursor: _Cursor, key: str, kind: int) -> Value:
    if kind == _STRING:
        return cursor.string(key, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(cursor, key)
    values = _scalars(cursor, key, kind, 1)
    if kind == _FLOAT32:
        # The shortest decimal that is the same f32: 1e-05 rather than 9.999999747378752e-06.
        return float(str(values[0]))
    item: bool | int | float = values[0].item()
    return item


def _array(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32(f"the item type of {key}")
    if kind == _ARRAY:
        raise cursor.error(f"{key} is an array of arrays, which is not read")
    if kind == _STRING:
        count = cursor.count(f"strings in {key}", MAX_ARRAY_STRINGS, least_bytes=8)
        return cursor.strings(count, key)
    count = cursor.u64(f"the length of {key}")
    return _scalars(cursor, key, kind, count)


def _scalars(cursor: _Cursor, key: str, kind: int, count: int) -> Array:
    if kind not in _SCALARS:
        raise cursor.error(f"{key} has the value type {kind}, which GGUF does not define")
    dtype = np.dtype(_SCALARS[kind])
    start = cursor.take(count * dtype.itemsize, key)
    if kind == _BOOL:
        raw = np.frombuffer(cursor.data, np.uint8, count, start)
        if raw.size and raw.max() > 1:
            raise cursor.error(f"{key} has the byte {raw.max()} for a truth value")
    return np.frombuffer(cursor.data, dtype, count, start)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    good = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not good or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):  # type: ignore[operator]
        raise cursor.error(
            f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}"
        )
    return int(alignment)  # type: ignore[arg-type]


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The directory; as in ggml, tensors lie in its order, each padded to the alignment."""
    directory: dict[str, tuple[tuple[int, ...], Encoding, int, int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor's name", MAX_NAME_BYTES)
        if name in directory:
            raise cursor.error(f"has the tensor {name!r} twice")
        shape = _shape(cursor, name)
        encoding = _encoding(cursor, name, cursor.u32(f"the type of {name}"), shape)
        nbytes = math.prod(shape) // encoding.block * encoding.block_bytes
        directory[name] = shape, encoding, nbytes, cursor.u64(f"the offset of {name}")

    tensors: dict[str, TensorInfo] = {}
    base = end = _padded(cursor.at, alignment)
    expected = 0
    for name, (shape, encoding, nbytes, offset) in directory.items():
        if offset != expected:
            raise cursor.error(
                f"the tensor {name} is at offset {offset}, where {expected} is expected: tensors "
                "must follow one another without overlap or gap"
            )
        end = base + offset + nbytes
        if end > cursor.size:
            raise cursor.error(
                f"the tensor {name} ends at byte {end}, but the file has {cursor.size}: it is "
                "damaged or was cut short; fetch it again"
            )
        tensors[name] = TensorInfo(name, shape, encoding, base + offset, nbytes)
        expected = _padded(offset + nbytes, alignment)
    if cursor.size > _padded(end, alignment):
        raise cursor.error(
            f"has {cursor.size} bytes, {cursor.size - end} more than its tensors need: it is "
            "damaged; fetch it again"
        )
    return tensors


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    dims = cursor.u32(f"the number of dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.error(f"the tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are read")
    innermost_first = [cursor.u64(f"a dimension of {name}") for _ in range(dims)]
    if 0 in innermost_first:
        raise cursor.error(f"the tensor {name} has a dimension of size 0")
    return tuple(reversed(innermost_first))


def _encoding(cursor: _Cursor, name: str, kind: int, shape: tuple[int, ...]) -> Encoding:
    encoding = ENCODINGS.get(kind)
    if encoding is None:
        known = ", ".join(encoding.name for encoding in ENCODINGS.values())
        raise cursor.error(
            f"the tensor {name} is stored as {UNSUPPORTED.get(kind, f'ggml type {kind}')}, which "
            f"is not supported; supported are {known}"
        )
    if shape[-1] % encoding.block:
        raise cursor.error(
            f"the tensor {name} has rows of {shape[-1]}, not a multiple of the {encoding.block} "
            f"that a block of {encoding.name} holds"
        )
    return encoding


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
