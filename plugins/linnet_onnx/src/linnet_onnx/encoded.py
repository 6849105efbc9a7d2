"""Checkpoints of weights in blocks: ``model.blocks``, as it is written and as it is read back.

The file is laid out as safetensors are, and called otherwise because only this module knows what it
means. A matrix NAME of the Transformers dialect lies in it as ``NAME.int4``, ``NAME.int4.scales``
and ``NAME.int4.zeros``, or as ``NAME.int8`` and its scales; every other tensor under its own name,
in f32; what graphs read otherwise than the dialect has it, as ``graph.NAME``. The manifest lists
the matrices.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import CheckpointError
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel, BoundParameter, stored_tensors
from linnet.weights.checkpoint import Array, Checkpoint, StoredTensor
from linnet.weights.dtypes import cast, finite
from linnet.weights.folder import with_files_beside
from linnet.weights.paths import inside
from linnet.weights.safetensors import read_file
from linnet.weights.strict_json import read_json
from linnet_onnx.blocks import BITS, BLOCK, decode, stored_parts
from linnet_onnx.files import BLOCKS, MANIFEST, Place, place_of, places, write_read_once
from linnet_onnx.graph import KINDS, Stored

GRAPH = "graph."
"""Before the name of what only graphs read."""
Listed = dict[str, dict[str, Any]]


def write_blocks(
    model: BoundModel, program: Program, stored: Mapping[str, Stored], folder: Path
) -> tuple[dict[str, Place], Listed]:
    """Write ``model.blocks``: where graphs find what they read, and the manifest's matrices.

    ``stored`` are the tensors that graphs of ``program`` read, by name. Raises CheckpointError for
    values that are not finite.
    """
    joined = {p.path: p.parts or (p.path,) for p in program.parameters}
    parts: dict[str, tuple[str, ...]] = {}
    pieces: list[Stored] = []
    listed: Listed = {}
    carried = stored_tensors(model)
    for name in stored:
        found = re.fullmatch(r"(.+)\.int([48])", name)
        if found is None:
            continue
        path, bits = found[1], int(found[2])
        for part in joined[path]:
            pieces += _matrix(model.parameters[part], bits)
            listed[part] = _describe(model.parameters[part], carried[part], bits)
        for kind in ("", ".scales", ".zeros")[: 3 if bits == 4 else 2]:
            parts[name + kind] = tuple(f"{part}.int{bits}{kind}" for part in joined[path])
    plain = [name for name in stored if name not in parts]
    order = [part for name in plain for part in joined[name]]
    order = [
        path for path in dict.fromkeys([*order, *carried]) if path not in listed or path in order
    ]
    same = set()
    for path in order:
        parameter, tensor = model.parameters[path], carried[path]
        pieces.append(_plain(path, tensor))
        if tensor.read is parameter.read or np.array_equal(tensor.read(), parameter.read()):
            same.add(path)
    for name in plain:
        parts[name] = joined[name]
        if not same.issuperset(joined[name]):
            parts[name] = (GRAPH + name,)
            s = stored[name]
            pieces.append(Stored(GRAPH + name, s.kind, s.shape, s.read))
            order.append(GRAPH + name)
    order += [piece for name in parts if name not in plain for piece in parts[name]]
    write_read_once(pieces, order, folder / BLOCKS)
    known = places(folder)
    where = {name: place_of(s, parts[name], known) for name, s in stored.items()}
    assert all(where.values()), [name for name, place in where.items() if place is None]
    return {name: place for name, place in where.items() if place is not None}, listed


def _matrix(parameter: BoundParameter, bits: int) -> list[Stored]:
    def read() -> Array:
        return finite(cast(parameter.read(), DType.F32, parameter.path), parameter.path)

    rows, width = parameter.shape
    return stored_parts(parameter.path, rows, width, bits, read)


def _plain(path: str, tensor: StoredTensor) -> Stored:
    def read() -> Array:
        return finite(cast(tensor.read(), DType.F32, path), path)

    return Stored(path, KINDS[DType.F32], tensor.shape, read)


def _describe(parameter: BoundParameter, tensor: StoredTensor, bits: int) -> dict[str, Any]:
    transposed = False
    if tensor.read is not parameter.read:
        transposed = np.array_equal(tensor.read().T, parameter.read())
        assert transposed, f"{parameter.path} is stored in a way that blocks cannot be"
    return {"bits": bits, "shape": list(parameter.shape), "transposed": transposed}


class BlocksFormat:
    """Opens a folder that the exporter wrote with weights in blocks, which are read as f32."""

    def open(self, path: Path) -> Checkpoint:
        """Raises CheckpointError for whatever is missing, damaged or outside the folder."""
        folder = path if path.is_dir() else path.parent
        manifest = inside(folder, MANIFEST)
        listed = read_json(manifest).get("blocks")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(
                f"{manifest}: lists no matrices in blocks; export the model again"
            )
        file = inside(folder, BLOCKS)
        held = read_file(file)
        matrices, used = {}, set[str]()
        for name, entry in listed.items():
            bits, shape, transposed = _entry(manifest, name, entry)
            pieces = list(_pieces(file, held, name, bits, shape))
            used.update(piece.name for piece in pieces)
            matrices[name] = _decoded(name, pieces, bits, shape, transposed)
        plain = {
            name: tensor
            for name, tensor in held.items()
            if name not in used and not name.startswith(GRAPH)
        }
        kinds = " and ".join(sorted({tensor.encoding or "" for tensor in matrices.values()}))
        # An embedding that is the head, too, lies there in both ways.
        note = f"matrices in {kinds}, read as f32"
        return with_files_beside(folder, "onnx-blocks", {**matrices, **plain}, [note])


def _entry(manifest: Path, name: str, entry: Any) -> tuple[int, tuple[int, int], bool]:
    match entry:
        case {"bits": int(bits), "shape": [int(rows), int(width)], "transposed": bool(transposed)}:
            if bits in BITS.values() and rows > 0 and width > 0:
                return bits, (rows, width), transposed
    raise CheckpointError(f"{manifest}: blocks has {str(entry)[:80]} for {name[:80]!r}")


def _pieces(
    file: Path, held: Mapping[str, StoredTensor], name: str, bits: int, shape: Sequence[int]
) -> Iterator[StoredTensor]:
    rows, width = shape
    for wanted in stored_parts(name, rows, width, bits, lambda: np.empty(0, np.float32)):
        there = held.get(wanted.name)
        if there is None:
            raise CheckpointError(f"{file}: has no {wanted.name}; export the model again")
        if KINDS[there.dtype] is not wanted.kind or there.shape != wanted.shape:
            raise CheckpointError(
                f"{file}: {there.name} is {there.dtype}{list(there.shape)}; blocks of {BLOCK} of a "
                f"matrix {list(shape)} are {wanted.kind.name.lower()}{list(wanted.shape)}"
            )
        yield there


def _decoded(
    name: str, pieces: Sequence[StoredTensor], bits: int, shape: tuple[int, int], transposed: bool
) -> StoredTensor:
    def read() -> Array:
        codes, scales, *zeros = (piece.read() for piece in pieces)
        values = decode(codes, scales, zeros[0] if zeros else None, shape[1])
        return np.ascontiguousarray(values.T) if transposed else values

    encoding = f"int{bits} blocks of {BLOCK}"
    stored = shape[::-1] if transposed else shape
    return StoredTensor(name, stored, DType.F32, read, encoding)
