"""The files of an export: weights that graphs point into, the graphs, and the text side.

The weights are an ordinary ``model.safetensors``, so that the folder is a checkpoint as well, and
graphs name places in it: nothing is stored twice. What a graph reads otherwise than the checkpoint
has it (a norm's scale less one) lies beside it in ``graph.safetensors``. Weights in blocks are in
``model.blocks``, see ``encoded.py``.
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_ir as ir

from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel, BoundParameter, stored_tensors
from linnet.weights.checkpoint import Array, StoredTensor
from linnet.weights.dtypes import finite_cast, raw_bytes
from linnet.weights.mapped import OneAtATime
from linnet.weights.safetensors import SINGLE, Entry, write_file, write_text
from linnet_onnx.graph import KINDS, Graph, Stored

OWN, BLOCKS = "graph.safetensors", "model.blocks"
MANIFEST, SCHEMA = "linnet-onnx.json", 1
TYPES = {kind: dtype for dtype, kind in KINDS.items() if dtype is not DType.U32}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are."""

    file: str
    offset: int
    length: int


def write_checkpoint(model: BoundModel, program: Program, dtype: DType, folder: Path) -> set[str]:
    """Write ``model.safetensors``; the paths of parameters that graphs may read from it.

    What a pass has joined lies in it one after the other, in the order of ``program``. Raises
    CheckpointError for values that are not finite, or would not be in ``dtype``.
    """
    stream, stored = OneAtATime(), stored_tensors(model)
    order = [path for p in program.parameters for path in p.tensors]
    order = [path for path in dict.fromkeys([*order, *stored]) if path in stored]
    entries, same = [], set()
    for path in order:
        tensor, parameter = stored[path], model.parameters[path]
        read = stream.reading(tensor.read)
        entries.append(
            Entry(
                path,
                dtype,
                tensor.shape,
                lambda r=read, p=path: finite_cast(r(), dtype, p),  # type: ignore[misc]
            )
        )
        if holds(tensor, parameter):
            same.add(path)
    write_file(folder / SINGLE, entries)
    stream.close()
    return same


def holds(tensor: StoredTensor, parameter: BoundParameter) -> bool:
    """Whether a tensor of the checkpoint has a parameter's values as the program has them."""
    return tensor.read is parameter.read or np.array_equal(tensor.read(), parameter.read())


def write_read_once(stored: Sequence[Stored], order: Sequence[str], path: Path) -> None:
    """Write tensors in an order of names, as far as their widths let that be.

    Each is read once, in the order of ``stored``, and lies in a file meanwhile: codes, scales and
    zeros of a matrix come from one encoding, and the final file has them apart.
    """
    with tempfile.TemporaryFile(dir=path.parent) as spool:
        entries = {}
        for s in stored:
            start = spool.tell()
            values = s.read()
            spool.write(raw_bytes(values).data)
            read = partial(_again, spool, start, values.dtype, s.shape)
            entries[s.name] = Entry(s.name, TYPES[s.kind], s.shape, read)
            del values
        write_file(path, [entries[name] for name in order])


def _again(spool: IO[bytes], start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    spool.seek(start)
    data = spool.read(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def places(path: Path) -> dict[str, Place]:
    """Where each tensor of a file that was written lies, by its name."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found = {}
    for tensor, entry in header.items():
        start, end = entry["data_offsets"]
        found[tensor] = Place(path.name, 8 + size + start, end - start)
    return found


def place_of(stored: Stored, parts: Sequence[str], known: Mapping[str, Place]) -> Place | None:
    """The place of a tensor whose parts are called so, if they lie one after the other."""
    if not parts or any(part not in known for part in parts):
        return None
    first, end = known[parts[0]], known[parts[0]].offset
    for part in parts:
        if known[part].file != first.file or known[part].offset != end:
            return None
        end += known[part].length
    whole = Place(first.file, first.offset, end - first.offset)
    return whole if whole.length == stored.nbytes else None


def write_graph(graph: Graph, name: str, where: Mapping[str, Place], folder: Path) -> None:
    """Write ``NAME.onnx`` and have the ONNX checker and its shape inference look at it."""
    model = graph.model(name)
    for stored in graph.stored:
        place = where[stored.name]
        at = stored.lying(place.file, place.offset)
        model.graph.initializers[stored.name].const_value = at
    proto = ir.to_proto(model)
    path = folder / f"{name}.onnx"
    path.write_bytes(proto.SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)


def describe(graph: Graph) -> dict[str, Any]:
    """Inputs and outputs of a graph, for readers."""

    def tell(values: Sequence[ir.Value]) -> list[dict[str, Any]]:
        return [
            {
                "name": v.name,
                "dtype": str(TYPES[v.dtype or ir.DataType.FLOAT]),
                "shape": [d if isinstance(d, int) else str(d.value) for d in v.shape or ()],
            }
            for v in values
        ]

    return {"inputs": tell(graph.inputs), "outputs": tell(graph.outputs)}


def write_text_side(model: BoundModel, folder: Path) -> None:
    """Config, tokenizer, chat template and generation config, as the checkpoint has them."""
    tied = any(p.tied_to is not None for p in model.program.parameters)
    config = {**model.checkpoint.config, "tie_word_embeddings": tied}
    text = model.checkpoint.text
    tables = {
        "config.json": config,
        "tokenizer_config.json": text.tokenizer_config,
        "generation_config.json": text.generation_config,
    }
    for name, table in tables.items():
        if table is not None:
            write_text(folder / name, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    for name, content in (
        ("tokenizer.json", text.tokenizer),
        ("chat_template.jinja", text.chat_template),
    ):
        if content is not None:
            write_text(folder / name, content)
