"""The ONNX exporter: graphs of every entry, their weights, and the files that a user needs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Artifact
from linnet.spec.program import Program
from linnet.spec.types import DType
from linnet.verification.engine import Engine, verifier
from linnet.verification.verify import Bound, save, verify
from linnet.weights.binding import BoundModel, matrix_dtype
from linnet.weights.paths import new_folder
from linnet.weights.safetensors import SINGLE, write_text
from linnet_onnx import files
from linnet_onnx.blocks import BITS
from linnet_onnx.encoded import write_blocks
from linnet_onnx.graph import Graph, Stored
from linnet_onnx.models import Graphs
from linnet_onnx.overflow import refuse_overflow
from linnet_onnx.step import step_program
from linnet_onnx.weights import Weights
from linnet_onnx.writer import write_entry

DIALECTS = ("standard", "ort")
FLOATS = (DType.F32, DType.F16, DType.BF16)
OPTIONS = ("dtype", "dialect", "max_seq", "verify", "engine_python")
ENGINE = Engine("onnxruntime", Path(__file__).parent / "engines" / "ort_engine.py", "onnxruntime")
BOUNDS = {
    "f32": Bound(top1=0.99, kl=1e-3),
    "f16": Bound(top1=0.99, kl=1e-3),
    "bf16": Bound(top1=0.95, kl=1e-2),
    "int8": Bound(top1=0.9, kl=1e-2),
    "int4": Bound(top1=0.6, kl=1.0),
}
"""What ONNX Runtime must hold against the model in f32. Blocks change a model, in 8 bits the token
where two are about as likely; their bounds tell a changed one from a broken one."""


class OnnxExporter:
    """Writes ``NAME.onnx`` for each graph, ``model.safetensors`` (``model.blocks`` of weights in
    blocks), and ``linnet-onnx.json``.

    Options: ``dtype``, f32, f16 or bf16, as the matrices are stored when left out, or int8 or int4
    for weights in blocks; ``dialect``, ``standard`` (ONNX's own operators, a graph for each entry)
    or ``ort`` (ONNX Runtime's fused operators, one graph for prompt and step); ``max_seq``, how
    many positions the tables of ``ort`` reach; ``verify``, ``onnxruntime`` (or true), in the
    environment of ``engine_python``.
    """

    def export(self, model: BoundModel, folder: Path, options: Mapping[str, Any]) -> Artifact:
        """Write ``folder`` whole, or not at all.

        Raises UnavailableError for options that there are none or do not fit, and for f16 where
        what the model computes on a probe prompt overflows; CheckpointError for weights that the
        dtype cannot hold.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UnavailableError(
                f"the onnx exporter has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}"
            )
        engine = verifier(options, {"onnxruntime": ENGINE})
        dtype, dialect = _dtype(options, model), _dialect(options)
        context = _context(options, model)
        if dtype == "f16":
            refuse_overflow(model)
        with new_folder(folder) as beside:
            program, graphs = _graphs(model, dtype, dialect, context)
            files.write_text_side(model, beside)
            stored = {s.name: s for graph in graphs.values() for s in graph.stored}
            manifest: dict[str, Any] = {
                "schema": files.SCHEMA,
                "dialect": dialect,
                "dtype": dtype,
                "opset": max(graph.opset for graph in graphs.values()),
                "max_seq": context if dialect == "ort" else None,
                "graphs": {name: files.describe(graph) for name, graph in graphs.items()},
            }
            if dtype in BITS:
                where, manifest["blocks"] = write_blocks(model, program, stored, beside)
            else:
                where = _write_floats(model, program, DType(dtype), stored, beside)
            for name, graph in graphs.items():
                files.write_graph(graph, name, where, beside)
            write_text(beside / files.MANIFEST, json.dumps(manifest, indent=1) + "\n")
            verification = None
            if engine is not None:
                python = options.get("engine_python")
                verification = verify(model, beside, engine, BOUNDS[dtype], python=python)
                save(verification, beside)
            names = sorted(path.name for path in beside.iterdir())
        return Artifact(folder, tuple(folder / n for n in names), (), verification)


def _graphs(
    model: BoundModel, dtype: str, dialect: str, context: int
) -> tuple[Program, dict[str, Graph]]:
    """The graphs by name, and the program whose parameters they read."""
    if dialect == "standard":
        program = model.program
        weights = Weights(program, model.parameters, DType(dtype))
        return program, {
            name: write_entry(program, name, weights, DType(dtype)) for name in program.entries
        }
    writer = Graphs(model, dtype, "fast", context)
    graphs = {"step": writer.step().graph, "forward": writer.forward(), "sample": writer.sample()}
    return step_program(model.program), graphs


def _write_floats(
    model: BoundModel, program: Program, dtype: DType, stored: Mapping[str, Stored], folder: Path
) -> dict[str, files.Place]:
    """The checkpoint, and the tensors that graphs cannot read from it: where each lies."""
    parts = {p.path: p.tensors for p in program.parameters}
    same = files.write_checkpoint(model, program, dtype, folder)
    known = {n: place for n, place in files.places(folder / SINGLE).items() if n in same}
    found = {name: files.place_of(s, parts[name], known) for name, s in stored.items()}
    where = {name: place for name, place in found.items() if place is not None}
    others = [name for name in stored if name not in where]
    if others:
        own = folder / files.OWN
        files.write_read_once([stored[name] for name in others], others, own)
        where |= files.places(own)
    return where


def _dtype(options: Mapping[str, Any], model: BoundModel) -> str:
    asked = options.get("dtype")
    if asked is None:
        stored = matrix_dtype(model)
        return str(stored if stored in FLOATS else DType.F32)
    known = [*map(str, FLOATS), *BITS]
    if asked not in known:
        raise UnavailableError(f"the onnx exporter writes {', '.join(known)}, not {asked!r}")
    return str(asked)


def _dialect(options: Mapping[str, Any]) -> str:
    encoded = options.get("dtype") in BITS
    dialect = options.get("dialect", "ort" if encoded else "standard")
    if dialect not in DIALECTS:
        raise UnavailableError(f"dialect is {' or '.join(DIALECTS)}, not {dialect!r}")
    if encoded and dialect != "ort":
        raise UnavailableError(
            f"weights in {options['dtype']} are read by operators of ONNX Runtime: ask for "
            "dialect=ort"
        )
    return str(dialect)


def _context(options: Mapping[str, Any], model: BoundModel) -> int:
    asked = str(options.get("max_seq", model.max_positions or 2048))
    if not asked.isdecimal() or not 0 < int(asked) <= (model.max_positions or 1 << 31):
        limit = f" to {model.max_positions}" if model.max_positions else ""
        raise UnavailableError(f"max_seq is {asked!r}, not a number from 1{limit}")
    return int(asked)
