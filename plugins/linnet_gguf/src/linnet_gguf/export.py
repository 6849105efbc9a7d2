"""The GGUF exporter: a bound model as one file that llama.cpp loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Artifact
from linnet.spec.types import DType
from linnet.verification.engine import Engine, verifier
from linnet.verification.verify import Bound, save, verify
from linnet.weights.binding import BoundModel, matrix_dtype
from linnet.weights.mapped import OneAtATime
from linnet.weights.paths import new_folder
from linnet.weights.safetensors import write_text as write_text_file
from linnet_gguf import gpt2, llama_writer, names
from linnet_gguf.architectures import ARCHITECTURES
from linnet_gguf.container import Value
from linnet_gguf.modelfile import modelfile
from linnet_gguf.tokenizer import PREFIX
from linnet_gguf.tokenizer_writer import write_text
from linnet_gguf.writer import BY_NAME, TensorOut, write_gguf

BY_MODEL_TYPE = {kind: arch for arch in ARCHITECTURES.values() for kind in arch.written_as}
FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "bf16": 32}
"""The dtypes that are written, and ``general.file_type`` for each."""
OUTER = ("token_embd.weight", "position_embd.weight", "output.weight")
"""Matrices that decide most: beside 4-bit blocks, llama.cpp's own converter keeps them finer."""
OPTIONS = ("dtype", "name", "pre_tokenizer", "verify", "engine_python")
LLAMACPP = Engine("llamacpp", Path(__file__).parent / "engines" / "llamacpp.py", "xllamacpp")
BOUNDS = {
    "f32": Bound(top1=0.99, kl=1e-3),
    "f16": Bound(top1=0.99, kl=1e-3),
    "bf16": Bound(top1=0.99, kl=1e-3),
    "q8_0": Bound(top1=0.95, kl=1e-2),
    "q4_0": Bound(top1=0.6, kl=1.0),
    "q4_1": Bound(top1=0.6, kl=1.0),
}
"""What llama.cpp must hold against the model before its numbers were encoded: 4-bit blocks change a
model, and their bound tells a changed one from a broken one."""


class GGUFExporter:
    """Writes ``model-DTYPE.gguf``, and a ``Modelfile`` for Ollama beside it.

    Options: ``dtype``, one of ``FILE_TYPES``, the one that the matrices are stored in when left
    out; ``name``, what the file calls the model; ``pre_tokenizer``, llama.cpp's name of the rule
    that splits text, where it is not recognised.
    """

    def export(self, model: BoundModel, folder: Path, options: Mapping[str, Any]) -> Artifact:
        """Write ``folder`` whole, or not at all.

        Matrices get the dtype, vectors are f32 as llama.cpp wants them; with 4-bit blocks the
        embedding and the head are q8_0. Raises UnavailableError for a model that llama.cpp does
        not know or computes otherwise, CheckpointError for values that the dtype cannot hold.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UnavailableError(
                f"the gguf exporter has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}"
            )
        engine = verifier(options, {"llamacpp": LLAMACPP})
        dtype = options.get("dtype") or _stored(model)
        if dtype not in FILE_TYPES:
            raise UnavailableError(
                f"the gguf exporter writes {', '.join(FILE_TYPES)}, not {dtype!r}"
            )
        notes: list[str] = []
        name, keys, sources = architecture_of(model, notes)
        text = write_text(
            model.checkpoint.text,
            model.checkpoint.config,
            model.vocab,
            options.get("pre_tokenizer"),
        )
        metadata: dict[str, Value] = {
            "general.name": options.get("name") or model.checkpoint.location.stem,
            "general.file_type": FILE_TYPES[dtype],
            "general.quantization_version": 2,
            **keys,
            **text.metadata,
        }
        stream = OneAtATime()
        tensors = [
            TensorOut(to, shape, BY_NAME[_encoding(to, shape, dtype)], stream.reading(read))
            for to, shape, read in sources
        ]
        file = f"model-{dtype}.gguf"
        with new_folder(folder) as beside:
            write_gguf(beside / file, name, metadata, tensors)
            stream.close()
            generation = model.checkpoint.text.generation_config or {}
            adds_bos = text.metadata.get(f"{PREFIX}add_bos_token") is True
            content, note = modelfile(file, text.tokenizer, generation, adds_bos=adds_bos)
            write_text_file(beside / "Modelfile", content)
            verification = None
            if engine is not None:
                verification = verify(
                    model, beside / file, engine, BOUNDS[dtype], python=options.get("engine_python")
                )
                save(verification, beside)
            others = sorted(path.name for path in beside.iterdir() if path.name != file)
        files = tuple(folder / each for each in (file, *others))
        notes += [*text.notes, *([note] if note else [])]
        return Artifact(folder, files, tuple(notes), verification)


def architecture_of(
    model: BoundModel, notes: list[str]
) -> tuple[str, dict[str, Value], list[llama_writer.Source]]:
    """``general.architecture``, its keys and its tensors, none of which is read yet."""
    model_type = str(model.checkpoint.config.get("model_type"))
    if model_type == gpt2.ARCHITECTURE:
        return gpt2.ARCHITECTURE, gpt2.metadata(model), gpt2.tensors(model)
    architecture = BY_MODEL_TYPE.get(model_type)
    if architecture is None:
        raise UnavailableError(
            f"models of the type {model_type!r} cannot be written as GGUF; those that can are "
            f"{', '.join(sorted((*BY_MODEL_TYPE, gpt2.ARCHITECTURE)))}"
        )
    keys = llama_writer.metadata(model, architecture)
    return architecture.name, keys, llama_writer.tensors(model, architecture, notes)


def _stored(model: BoundModel) -> str:
    """The dtype that holds every matrix as it is read."""
    stored = matrix_dtype(model).value
    return stored if stored in FILE_TYPES else DType.F32.value


def _encoding(name: str, shape: tuple[int, ...], dtype: str) -> str:
    if len(shape) < 2 or name == names.ROPE_FACTORS:
        return "f32"
    return "q8_0" if name in OUTER and dtype.startswith("q4") else dtype
