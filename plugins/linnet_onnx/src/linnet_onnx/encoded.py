"""Checkpoints of weights in blocks: ``model.blocks``, as it is written and as it is read back.

The file is laid out as safetensors are, and called otherwise because only this module knows what it
means. A matrix NAME of the Transformers dialect lies in it as ``NAME.int4``, ``NAME.int4.scales``
and ``NAME.int4.zeros``, or as ``NAME.int8`` and its scales; every other tensor under its own name,
in f32, and so is an embedding whose other use, a tied head, is in blocks; what graphs read
otherwise than the dialect has it, as ``graph.NAME``. The manifest lists the matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from linnet.errors import CheckpointError, UnavailableError
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel, BoundParameter, stored_tensors
from linnet.weights.checkpoint import Array, Checkpoint, StoredTensor
from linnet.weights.dtypes import finite_cast
from linnet.weights.folder import with_files_beside
from linnet.weights.paths import inside, reading
from linnet.weights.safetensors import read_file
from linnet.weights.strict_json import read_json
from linnet_onnx.blocks import BITS, BLOCK, decode, matrix_of, names, stored_parts
from linnet_onnx.files import (
    BLOCKS,
    MANIFEST,
    SCHEMA,
    Place,
    holds,
    place_of,
    places,
    write_read_once,
)
from linnet_onnx.graph import KINDS, Stored

GRAPH = "graph."
"""Before the name of what only graphs read."""
Listed = dict[str, dict[str, Any]]


def write_blocks(
    model: BoundModel, program: Program, stored: Mapping[str, Stored], folder: Path
) -> tuple[dict[str, Place], Listed]:
    """Write ``model.blocks``: where graphs find what they read, and the manifest's matrices.

    ``stored`` are the tensors that graphs of ``program`` read, by name. Raises CheckpointError for
    values that are not finite, UnavailableError for a family that stores matrices in a way of its
    own.
    """
    joined = {p.path: p.tensors for p in program.parameters}
    carried = stored_tensors(model)
    encoded: dict[str, int] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for found in filter(None, map(matrix_of, stored)):
        path, bits = found
        encoded |= dict.fromkeys(joined[path], bits)
        pieces = [names(part, bits) for part in joined[path]]
        parts |= zip(names(path, bits), zip(*pieces, strict=True), strict=True)
    blocks = [name for group in parts.values() for name in group]

    floats = [name for name in stored if name not in parts]
    read = dict.fromkeys(part for name in floats for part in joined[name])
    kept = [
        path for path in dict.fromkeys([*read, *carried]) if path in read or path not in encoded
    ]
    tensors = [_plain(path, carried[path]) for path in kept]
    same = {path for path in kept if holds(carried[path], model.parameters[path])}
    for name in floats:
        parts[name] = joined[name]
        if not same.issuperset(joined[name]):
            parts[name] = (GRAPH + name,)
            tensors.append(replace(stored[name], name=GRAPH + name))
    order = [tensor.name for tensor in tensors] + blocks
    listed = {
        path: _describe(model.parameters[path], carried[path], bits, path in read)
        for path, bits in encoded.items()
    }
    tensors += [t for path, bits in encoded.items() for t in _matrix(model.parameters[path], bits)]
    write_read_once(tensors, order, folder / BLOCKS)

    known, where = places(folder / BLOCKS), {}
    for name, tensor in stored.items():
        place = place_of(tensor, parts[name], known)
        assert place is not None, name
        where[name] = place
    return where, listed


def _matrix(parameter: BoundParameter, bits: int) -> list[Stored]:
    def read() -> Array:
        return finite_cast(parameter.read(), DType.F32, parameter.path)

    rows, width = parameter.shape
    return stored_parts(parameter.path, rows, width, bits, read)


def _plain(path: str, tensor: StoredTensor) -> Stored:
    def read() -> Array:
        return finite_cast(tensor.read(), DType.F32, path)

    return Stored(path, KINDS[DType.F32], tensor.shape, read)


def _describe(
    parameter: BoundParameter, tensor: StoredTensor, bits: int, plain: bool
) -> dict[str, Any]:
    transposed = not holds(tensor, parameter)
    if transposed and not np.array_equal(tensor.read().T, parameter.read(), equal_nan=True):
        raise UnavailableError(
            f"{parameter.path} is stored in a way that blocks are not: export it in f32, f16 or "
            "bf16"
        )
    return {
        "bits": bits,
        "shape": list(parameter.shape),
        "transposed": transposed,
        "plain": plain,
    }


class BlocksFormat:
    """Opens a folder that the exporter wrote with weights in blocks, which are read as f32."""

    def open(self, path: Path) -> Checkpoint:
        """Raises CheckpointError for whatever is missing, damaged or outside the folder."""
        with reading(path):
            return _open(path)


def _open(path: Path) -> Checkpoint:
    folder = path
    if not path.is_dir():
        folder = path.parent
        if path.name != BLOCKS:
            raise CheckpointError(f"{path}: only {BLOCKS} is known to be weights in blocks")
    manifest, file = inside(folder, MANIFEST), inside(folder, BLOCKS)
    table = read_json(manifest)
    if table.get("schema") != SCHEMA:
        raise CheckpointError(
            f"{manifest}: has the schema {str(table.get('schema'))[:20]!r}; this Linnet reads "
            f"{SCHEMA}"
        )
    listed = table.get("blocks")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{manifest}: lists no matrices in blocks; export the model again")
    held = read_file(file)
    tensors = {name: t for name, t in held.items() if not name.startswith(GRAPH)}
    for name, entry in listed.items():
        matrix = _entry(manifest, name, entry)
        pieces = list(_pieces(file, held, name, matrix))
        for piece in pieces:
            tensors.pop(piece.name, None)
        if matrix.plain != (name in held):
            there = "is there" if name in held else "is missing"
            raise CheckpointError(
                f"{file}: {name} in f32 {there}, and {MANIFEST} says otherwise; export the model "
                "again"
            )
        if not matrix.plain:
            tensors[name] = _decoded(name, pieces, matrix)
    kinds = sorted({tensor.encoding for tensor in tensors.values() if tensor.encoding})
    notes = [f"matrices in {' and '.join(kinds)}, read as f32"] if kinds else []
    return with_files_beside(folder, "onnx-blocks", tensors, notes)


class _Matrix(NamedTuple):
    """What the manifest says of one; ``plain`` is whether it is there in f32 as well.

    As an embedding is whose other use, the head, is in blocks: f32 is what is read then.
    """

    bits: int
    rows: int
    width: int
    transposed: bool
    plain: bool


def _entry(manifest: Path, name: str, entry: Any) -> _Matrix:
    match entry:
        case {
            "bits": int(bits),
            "shape": [int(rows), int(width)],
            "transposed": bool(transposed),
            "plain": bool(plain),
        } if name.isprintable() and len(name) < 1024:
            sizes = all(type(size) is int and 0 < size < 1 << 63 for size in (rows, width))
            if sizes and bits in BITS.values():
                return _Matrix(bits, rows, width, transposed, plain)
    raise CheckpointError(f"{manifest}: blocks has {repr(entry)[:100]} for {name[:80]!r}")


def _pieces(
    file: Path, held: Mapping[str, StoredTensor], name: str, matrix: _Matrix
) -> Iterator[StoredTensor]:
    rows, width = matrix.rows, matrix.width
    for wanted in stored_parts(name, rows, width, matrix.bits, lambda: np.empty(0, np.float32)):
        there = held.get(wanted.name)
        if there is None:
            raise CheckpointError(f"{file}: has no {wanted.name}; export the model again")
        if KINDS[there.dtype] is not wanted.kind or there.shape != wanted.shape:
            raise CheckpointError(
                f"{file}: {there.name} is {there.dtype}{list(there.shape)}; blocks of {BLOCK} of a "
                f"matrix [{rows}, {width}] are {wanted.kind.name.lower()}{list(wanted.shape)}"
            )
        yield there


def _decoded(name: str, pieces: Sequence[StoredTensor], matrix: _Matrix) -> StoredTensor:
    def read() -> Array:
        codes, scales, *zeros = (piece.read() for piece in pieces)
        values = decode(codes, scales, zeros[0] if zeros else None, matrix.width)
        return np.ascontiguousarray(values.T) if matrix.transposed else values

    shape = (matrix.rows, matrix.width)
    encoding = f"int{matrix.bits} blocks of {BLOCK}"
    return StoredTensor(
        name, shape[::-1] if matrix.transposed else shape, DType.F32, read, encoding
    )
