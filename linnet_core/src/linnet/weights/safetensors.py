"""safetensors files: a strict reader over a memory map, and writers that stream.

The header is checked whole before any value is touched: a file that lies about its sizes costs an
error, not memory. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, StoredTensor
from linnet.weights.dtypes import cast_bytes, dtype_of, numpy_dtype
from linnet.weights.paths import reading, replacing, settle
from linnet.weights.strict_json import loads

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

CODES = {
    "F64": DType.F64,
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "I64": DType.I64,
    "I32": DType.I32,
    "I16": DType.I16,
    "I8": DType.I8,
    "U64": DType.U64,
    "U32": DType.U32,
    "U16": DType.U16,
    "U8": DType.U8,
    "BOOL": DType.BOOL,
}
_NAMES = {dtype: code for code, dtype in CODES.items()}
_MAX_HEADER = 100 << 20
_MAX_RANK = 8
_MAX_NAME = 1024
_MAX_EXTENT = 1 << 63  # no file is larger, and products of a few of these still print


class Entry(NamedTuple):
    """A tensor to write; ``read`` is called when its turn comes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Array]
    source: DType | None = None
    """What ``read`` gives, where it is to be cast to ``dtype`` as it is written."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, values unread. Raises CheckpointError for whatever is not sound.

    ``read()`` gives a read-only view of a memory map (a copy where the file does not align the
    tensor), and refuses a file that has changed since.
    """
    with reading(path), path.open("rb") as file:
        stamp = _Stamp.of(file)
        header, start = _read_header(path, file, stamp.size)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(path, name, entry)
        nbytes = math.prod(shape) * dtype.itemsize
        if end - begin != nbytes:
            raise CheckpointError(
                f"{path}: {name} is {dtype}{list(shape)}, which takes {nbytes} bytes, but its "
                f"offsets span {end - begin}"
            )
        spans.append((begin, end, name))
        read = _Reader(path, stamp, start + begin, shape, dtype)
        tensors[name] = StoredTensor(name, shape, dtype, read)
    _check_cover(path, spans, start, stamp.size)
    return tensors


class _Stamp(NamedTuple):
    """What tells a file from one that took its place."""

    size: int
    modified: int
    inode: int

    @classmethod
    def of(cls, file: BinaryIO) -> "_Stamp":
        status = os.fstat(file.fileno())
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


_MAPS: WeakValueDictionary[tuple[Path, _Stamp], np.memmap[Any, Any]] = WeakValueDictionary()
"""Files in use, each mapped once: a map holds a file open, and tensors outnumber what may be."""


@dataclass(frozen=True)
class _Reader:
    """Reads one tensor as a view of its file's memory map, which lasts while any view does."""

    path: Path
    stamp: _Stamp
    offset: int
    shape: tuple[int, ...]
    dtype: DType

    def __call__(self) -> Array:
        numpy = numpy_dtype(self.dtype)
        if 0 in self.shape:
            return np.zeros(self.shape, numpy)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        with reading(self.path), self.path.open("rb") as file:
            now = _Stamp.of(file)
            if now != self.stamp:
                raise CheckpointError(
                    f"{self.path} has changed since it was opened ({self.stamp.size} bytes "
                    f"then, {now.size} now); open the model again"
                )
            whole = _MAPS.get((self.path, now))
            if whole is None:
                whole = _MAPS[self.path, now] = np.memmap(file, np.uint8, "r")
        raw = whole[self.offset : self.offset + nbytes]
        values = raw.view(numpy).reshape(self.shape)
        return values if values.flags.aligned else values.copy()


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise CheckpointError(
            f"{path}: states a header of {length} bytes, but the file is {size} bytes in all: it "
            "is cut short, or no safetensors file"
        )
    # A file that only pretends is found by its first byte, before its header is in memory.
    first = file.read(1)
    if not 2 <= length <= _MAX_HEADER or first != b"{":
        raise CheckpointError(
            f"{path}: is no safetensors file: its header, {length} bytes, starts with {first!r} "
            f"(it must be an object of at most {_MAX_HEADER} bytes)"
        )
    try:
        header = loads(first + file.read(length - 1))
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is no JSON object: {error}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: its __metadata__ holds other things than strings")
    return header, 8 + length


def _entry(path: Path, name: str, entry: Any) -> tuple[DType, tuple[int, ...], tuple[int, int]]:
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise CheckpointError(f"{path}: {name[:80]!r}... is not a tensor's name")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name} does not state dtype, shape and data_offsets alone")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in CODES:
        raise CheckpointError(
            f"{path}: {name} has dtype {str(code)[:80]!r}, which Linnet does not read; it reads "
            f"{', '.join(CODES)}: save the model in one of these"
        )

    def counts(values: Any) -> bool:
        return isinstance(values, list) and all(
            type(v) is int and 0 <= v < _MAX_EXTENT for v in values
        )

    # An empty tensor takes no bytes of the file, so only this bounds its other extents.
    def absurd() -> bool:
        return 0 in shape and math.prod(filter(None, shape)) >= _MAX_EXTENT // 8

    if not counts(shape) or len(shape) > _MAX_RANK or absurd():
        raise CheckpointError(f"{path}: {name} has shape {str(shape)[:80]}, which is none")
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path}: {name} has data_offsets {str(offsets)[:80]}, which are none"
        )
    return CODES[code], tuple(shape), (offsets[0], offsets[1])


def _check_cover(path: Path, spans: list[tuple[int, int, str]], start: int, size: int) -> None:
    """The tensors lie one after the other and fill the file: nothing shared, nothing hidden."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name} at {begin}:{end} {what} (expected {position})")
        position = end
    if start + position != size:
        what = "is cut short" if size < start + position else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path} {what}: expected {start + position} bytes, actual {size}; fetch it again"
        )


def write_file(
    path: Path, tensors: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file beside ``path`` and rename it: it is whole, or not there.

    Tensors are read one at a time, the widest element types first so that all are aligned.
    ``metadata`` is ``{"format": "pt"}`` unless given, which is what Transformers asks for.
    """
    with replacing(path) as file:
        _write(file, path, list(tensors), metadata)


def _write(
    file: BinaryIO, path: Path, entries: list[Entry], metadata: Mapping[str, str] | None
) -> None:
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"} if metadata is None else dict(metadata)
    }
    position = 0
    for entry in entries:
        if entry.name in header:
            raise CheckpointError(f"{path}: {entry.name} would be written twice")
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for entry in entries:
        _write_values(file, entry)


def _write_values(file: BinaryIO, entry: Entry) -> None:
    values = entry.read()
    announced = entry.source or entry.dtype
    if values.shape != entry.shape or dtype_of(values.dtype) is not announced:
        raise CheckpointError(
            f"{entry.name} was announced as {announced}{list(entry.shape)} but is "
            f"{values.dtype}{list(values.shape)}"
        )
    file.write(cast_bytes(values, entry.dtype, entry.name).data)


def write_sharded(
    folder: Path,
    tensors: Iterable[Entry],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write ``model.safetensors``, or numbered shards and their index as Transformers names them.

    A tensor is never split, so one larger than ``max_shard_bytes`` gets a shard of its own. No
    file is put in place before the last tensor is written. Raises CheckpointError if the folder
    holds other weights, which a reader could take for these.
    """
    shards = _plan(tensors, max_shard_bytes)
    places: dict[str, Path] = {}
    paths: dict[Path, list[Entry]] = {}
    for number, shard in enumerate(shards, 1):
        many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path = folder / (many if len(shards) > 1 else SINGLE)
        paths[path] = shard
        for entry in shard:
            if entry.name in places:
                raise CheckpointError(f"{path}: {entry.name} would be written twice")
            places[entry.name] = path
    written = [*paths, folder / INDEX] if len(shards) > 1 else [*paths]
    left = sorted({*folder.glob("*.safetensors"), *folder.glob(INDEX)} - {*written})
    if left:
        raise CheckpointError(
            f"{folder} holds {left[0].name}, which would lie beside the weights written now; "
            "choose an empty folder"
        )
    # Entered first, the index is put in place last.
    with ExitStack() as files:
        if len(shards) > 1:
            total = sum(entry.nbytes for shard in shards for entry in shard)
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: path.name for name, path in places.items()},
            }
            file = files.enter_context(replacing(folder / INDEX))
            file.write((json.dumps(index, indent=2) + "\n").encode())
        for path, shard in paths.items():
            file = files.enter_context(replacing(path))
            _write(file, path, shard, metadata)
            settle(file)
        # Stopped between two renames, what is left must not pass for either model.
        if len(shards) > 1:
            (folder / INDEX).unlink(missing_ok=True)
    return tuple(written)


def _plan(tensors: Iterable[Entry], max_shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in tensors:
        if shards[-1] and filled + entry.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def write_text(path: Path, text: str) -> None:
    """Write a text file beside ``path`` and rename it."""
    with replacing(path) as file:
        file.write(text.encode())


def entries_of(tensors: Sequence[StoredTensor]) -> list[Entry]:
    """Stored tensors as entries to write, unchanged."""
    return [Entry(t.name, t.dtype, t.shape, t.read) for t in tensors]
