"""The Transformers exporter: an ordinary checkpoint folder, for Transformers and what reads it.

Servers bundle readers of several ages, so what was renamed over time is written under both names.
Imports no framework: nothing here needs Transformers itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Artifact
from linnet.spec.types import DType
from linnet.verification.engine import Engine, verifier
from linnet.verification.verify import Bound, Reference, save, verify
from linnet.weights.binding import BoundModel, matrix_dtype, stored_tensors
from linnet.weights.checkpoint import StoredTensor, class_name
from linnet.weights.dtypes import cast
from linnet.weights.mapped import OneAtATime
from linnet.weights.paths import new_folder
from linnet.weights.safetensors import Entry, write_sharded
from linnet_hf.export_text import write_json, write_text_files
from linnet_hf.servers import read_otherwise

DTYPES = {DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16"}
"""The dtypes that are written, and Transformers' names for them."""
OPTIONS = ("dtype", "max_shard_bytes", "verify", "engine_python")
MAX_SHARD = 5_000_000_000
SCRIPTS = Path(__file__).parent / "engines"
ENGINES = {
    "transformers": Engine("transformers", SCRIPTS / "transformers_engine.py", "transformers"),
    "vllm": Engine("vllm", SCRIPTS / "vllm_engine.py", "vllm"),
    "sglang": Engine("sglang", SCRIPTS / "sglang_engine.py", "sglang"),
}
NOT_CARRIED = ("auto_map", "_name_or_path")
"""Config keys that name files or places the export does not have."""


class TransformersExporter:
    """Writes config, safetensors, tokenizer, chat template and generation config.

    Options: ``dtype``, as stored when left out; ``max_shard_bytes``, above which the tensors are
    split over several files (5 GB); ``verify``, ``transformers`` (or true), ``vllm`` or
    ``sglang``, to run it on what was written, in the environment of ``engine_python`` (see
    ``linnet.verification``).
    """

    def export(self, model: BoundModel, folder: Path, options: Mapping[str, Any]) -> Artifact:
        """Write ``folder`` whole, or not at all, reading one tensor at a time.

        With no dtype given nothing is rounded: tensors are written in the dtype of the matrices,
        and a vector that it cannot hold exactly as it is stored. Raises UnavailableError for
        options that there are none, CheckpointError for values that the dtype cannot hold.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise UnavailableError(
                f"the hf exporter has no option {', '.join(unknown)}; it has {', '.join(OPTIONS)}"
            )
        engine = verifier(options, ENGINES)
        _refuse_what_is_not_read(model)
        dtype = _dtype(options.get("dtype"), model)
        limit = _limit(options.get("max_shard_bytes", MAX_SHARD))
        stream = OneAtATime()
        notes = read_otherwise(model)
        exact = options.get("dtype") is None
        entries = [
            _entry(replace(t, name=name), dtype, exact, stream, notes)
            for name, t in stored_tensors(model).items()
        ]
        with new_folder(folder) as beside:
            write_json(beside / "config.json", full_config(model, dtype))
            write_text_files(model, beside)
            write_sharded(beside, entries, max_shard_bytes=limit)
            stream.close()
            verification = None
            if engine is not None:
                verification = _verify(model, beside, engine, dtype, options.get("engine_python"))
            names = sorted(path.name for path in beside.iterdir())
        return Artifact(folder, tuple(folder / name for name in names), tuple(notes), verification)


def _verify(
    model: BoundModel, folder: Path, engine: Engine, dtype: DType, python: str | None
) -> dict[str, Any]:
    """Run an engine on the folder; what was measured is written into it.

    Transformers must give the very logits that it gives for the model itself, in the same dtype.
    The others have kernels of their own: they compute the folder's weights in f32, and so does the
    model.
    """
    if engine.name == "transformers":
        bound, reference = Bound(top1=1, max_abs=0), Reference(dtype.value, "transformers")
    else:
        bound, reference = Bound(top1=0.98, kl=1e-3), Reference()
    verification = verify(model, folder, engine, bound, reference=reference, python=python)
    save(verification, folder)
    return verification


def _refuse_what_is_not_read(model: BoundModel) -> None:
    windows = [w for w in model.describe.get("windows", ()) if w is not None]
    longest = model.max_positions or 0
    if model.checkpoint.config.get("model_type") == "llama" and any(w < longest for w in windows):
        raise UnavailableError(
            f"the model has a sliding window of {min(windows)} tokens, which Transformers' Llama "
            "does not read: it would see all of them"
        )


def _dtype(asked: str | None, model: BoundModel) -> DType:
    if asked is None:
        stored = matrix_dtype(model)
        return stored if stored in DTYPES else DType.F32
    for dtype in DTYPES:
        if dtype.value == asked:
            return dtype
    raise UnavailableError(
        f"the hf exporter writes {', '.join(dtype.value for dtype in DTYPES)}, not {asked!r}"
    )


def _limit(asked: Any) -> int:
    try:
        limit = int(asked)
    except (TypeError, ValueError):
        limit = 0
    if limit < 1:
        raise UnavailableError(f"max_shard_bytes is {asked!r}, not a positive number of bytes")
    return limit


def _entry(
    tensor: StoredTensor, dtype: DType, exact: bool, stream: OneAtATime, notes: list[str]
) -> Entry:
    """A tensor to write, in ``dtype`` unless it must be ``exact`` and that would round it."""
    if exact and tensor.dtype is not dtype and not _holds(tensor, dtype):
        notes.append(
            f"{tensor.name} is written as {tensor.dtype}, as it is stored: {dtype} would round it"
        )
        dtype = tensor.dtype
    return Entry(tensor.name, dtype, tensor.shape, stream.reading(tensor.read), tensor.dtype)


def _holds(tensor: StoredTensor, dtype: DType) -> bool:
    """Whether every value of a tensor is one of ``dtype``'s."""
    widening = tensor.dtype in DTYPES and dtype is DType.F32
    if widening:
        return True
    values = tensor.read()
    return bool(np.array_equal(cast(values, dtype, tensor.name).astype(values.dtype), values))


def full_config(model: BoundModel, dtype: DType) -> dict[str, Any]:
    """``config.json``, the source's own keys first, in the dialects before and since 5."""
    config = {k: v for k, v in model.checkpoint.config.items() if k not in NOT_CARRIED}
    config.setdefault("architectures", [class_name(str(config["model_type"]))])
    config["tie_word_embeddings"] = any(p.tied_to for p in model.program.parameters)
    config |= {"dtype": DTYPES[dtype], "torch_dtype": DTYPES[dtype]}
    rope, ropes = model.describe.get("rope"), model.describe.get("ropes")
    if isinstance(ropes, Mapping):
        config.pop("rope_scaling", None)
        config |= ropes_by_layer_type(ropes)
    elif isinstance(rope, Mapping) and {"kind", "theta", "settings"} <= rope.keys():
        config.pop("rope_scaling", None)
        config |= both_ropes(rope)
    return config


def both_ropes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a typed config under their names before and since Transformers 5."""
    newer = rope_parameters(rope)
    both: dict[str, Any] = {"rope_theta": rope["theta"], "rope_parameters": newer}
    if "partial_rotary_factor" in newer:
        both["partial_rotary_factor"] = newer["partial_rotary_factor"]
    return both | _older_scaling(rope)


def ropes_by_layer_type(ropes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rotary settings for each type of layer, as Gemma 3 had them before Transformers 5, too."""
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    return {
        "rope_theta": full["theta"],
        "rope_local_base_freq": sliding["theta"],
        "rope_parameters": {kind: rope_parameters(rope) for kind, rope in ropes.items()},
        **_older_scaling(full),
    }


def rope_parameters(rope: Mapping[str, Any]) -> dict[str, Any]:
    """One rotary table's settings in the dialect of Transformers 5."""
    partial = {} if rope["partial"] == 1 else {"partial_rotary_factor": rope["partial"]}
    settings = {} if rope["kind"] == "default" else dict(rope["settings"])
    return {"rope_theta": rope["theta"], "rope_type": rope["kind"], **settings, **partial}


def _older_scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["kind"] == "default":
        return {}
    return {"rope_scaling": {"rope_type": rope["kind"], **dict(rope["settings"])}}
