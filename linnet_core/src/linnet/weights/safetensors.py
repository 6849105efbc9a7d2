"""safetensors files: a strict reader over a memory map, and writers that stream.

The header is checked whole before any value is touched: a file that lies about its sizes costs an
error, not memory. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, StoredTensor
from linnet.weights.dtypes import dtype_of, numpy_dtype
from linnet.weights.strict_json import loads

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


class Entry(NamedTuple):
    """A tensor to write; ``read`` is called when its turn comes."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, values unread. Raises CheckpointError for whatever is not sound."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _read_header(path, file, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(path, name, entry)
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{path}: {name} is {dtype}{list(shape)}, which takes "
                f"{math.prod(shape) * dtype.itemsize} bytes, but its offsets span {end - begin}"
            )
        spans.append((begin, end, name))
        read = _Reader(path, size, start + begin, shape, dtype)
        tensors[name] = StoredTensor(name, shape, dtype, read)
    _check_cover(path, spans, size - start)
    return tensors


class _Reader:
    """Reads one tensor as a view of a memory map that is opened when first needed."""

    def __init__(
        self, path: Path, size: int, offset: int, shape: tuple[int, ...], dtype: DType
    ) -> None:
        self.path, self.size, self.offset = path, size, offset
        self.shape, self.dtype = shape, dtype

    def __call__(self) -> Array:
        if 0 in self.shape:
            return np.zeros(self.shape, numpy_dtype(self.dtype))
        try:
            actual = self.path.stat().st_size
            if actual != self.size:
                raise CheckpointError(
                    f"{self.path}: was {self.size} bytes when opened and is {actual} now"
                )
            raw = np.memmap(
                self.path,
                np.uint8,
                "r",
                self.offset,
                (math.prod(self.shape) * self.dtype.itemsize,),
            )
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
        return raw.view(numpy_dtype(self.dtype)).reshape(self.shape)


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(
            f"{path}: states a header of {length} bytes, but the file has {size} in all: it is "
            "cut short or no safetensors file"
        )
    try:
        header = loads(file.read(length))
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _entry(path: Path, name: str, entry: Any) -> tuple[DType, tuple[int, ...], tuple[int, int]]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name} does not state dtype, shape and data_offsets alone")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in CODES:
        known = ", ".join(CODES)
        raise CheckpointError(f"{path}: {name} has dtype {code!r}; supported are {known}")

    def counts(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)

    if not counts(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(f"{path}: {name} has shape {str(shape)[:80]}, which is none")
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path}: {name} has data_offsets {str(offsets)[:80]}, which are none"
        )
    return CODES[code], tuple(shape), (offsets[0], offsets[1])


def _check_cover(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """The tensors lie one after the other and fill the file: nothing shared, nothing hidden."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name} at {begin}:{end} {what} (expected {position})")
        position = end
    if position != size:
        what = "cut short" if size < position else "followed by bytes that belong to no tensor"
        raise CheckpointError(
            f"{path}: its tensors take {position} bytes, but {size} follow the header: the file "
            f"is {what}; fetch it again"
        )


def write_file(
    path: Path, tensors: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file beside ``path`` and rename it: it is whole, or not there.

    Tensors are read one at a time. ``metadata`` is ``{"format": "pt"}`` unless given, which is
    what Transformers asks for.
    """
    entries = list(tensors)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
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

    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for entry in entries:
                _write_values(file, entry)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _write_values(file: BinaryIO, entry: Entry) -> None:
    values = entry.read()
    if values.shape != entry.shape or dtype_of(values.dtype) is not entry.dtype:
        raise CheckpointError(
            f"{entry.name} was announced as {entry.dtype}{list(entry.shape)} but is "
            f"{values.dtype}{list(values.shape)}"
        )
    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def write_sharded(
    folder: Path,
    tensors: Iterable[Entry],
    *,
    max_shard_bytes: int = 5_000_000_000,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Path, ...]:
    """Write ``model.safetensors``, or numbered shards and their index as Transformers names them.

    A tensor is never split, so one larger than ``max_shard_bytes`` gets a shard of its own.
    """
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in tensors:
        if shards[-1] and filled + entry.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], metadata)
        return (folder / "model.safetensors",)

    paths = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(path, shard, metadata)
        places |= {entry.name: path.name for entry in shard}
        paths.append(path)
    total = sum(entry.nbytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return (*paths, folder / "model.safetensors.index.json")


def write_text(path: Path, text: str) -> None:
    """Write a text file beside ``path`` and rename it."""
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def entries_of(tensors: Sequence[StoredTensor]) -> list[Entry]:
    """Stored tensors as entries to write, unchanged."""
    return [Entry(t.name, t.dtype, t.shape, t.read) for t in tensors]
