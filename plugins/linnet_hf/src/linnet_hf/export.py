"""The Transformers exporter: an ordinary checkpoint folder, for Transformers and what reads it.

Servers bundle readers of several ages, so what was renamed over time is written under both names.
Imports no framework: nothing here needs Transformers itself.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.plugins.interfaces import Artifact
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel, BoundParameter, matrix_dtype
from linnet.weights.checkpoint import Array
from linnet.weights.dtypes import cast
from linnet.weights.mapped import OneAtATime
from linnet.weights.paths import new_folder
from linnet.weights.safetensors import Entry, write_sharded
from linnet_hf.export_text import write_json, write_text_files

DTYPES = {DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16"}
"""The dtypes that are written, and Transformers' names for them."""
OPTIONS = ("dtype", "max_shard_bytes")
MAX_SHARD = 5_000_000_000
NOT_CARRIED = ("auto_map", "_name_or_path")
"""Config keys that name files or places the export does not have."""


class TransformersExporter:
    """Writes config, safetensors, tokenizer, chat template and generation config.

    Options: ``dtype``, as stored when left out; ``max_shard_bytes``, above which the tensors are
    split over several files (5 GB).
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
        dtype = _dtype(options.get("dtype"), model)
        limit = _limit(options.get("max_shard_bytes", MAX_SHARD))
        stream = OneAtATime()
        notes: list[str] = []
        exact = options.get("dtype") is None
        entries = [_entry(p, dtype, exact, stream, notes) for p in model.parameters.values()]
        with new_folder(folder) as beside:
            write_json(beside / "config.json", full_config(model, dtype))
            write_text_files(model, beside)
            write_sharded(beside, entries, max_shard_bytes=limit)
            stream.close()
            names = sorted(path.name for path in beside.iterdir())
        return Artifact(folder, tuple(folder / name for name in names), tuple(notes))


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
    parameter: BoundParameter, dtype: DType, exact: bool, stream: OneAtATime, notes: list[str]
) -> Entry:
    """A tensor to write, in ``dtype`` unless it must be ``exact`` and that would round it."""
    if exact and parameter.dtype is not dtype and not _holds(parameter, dtype):
        notes.append(
            f"{parameter.path} is written as {parameter.dtype}, as it is stored: {dtype} would "
            "round it"
        )
        dtype = parameter.dtype
    read: Callable[[], Array] = stream.reading(parameter.read)
    kind = dtype
    return Entry(parameter.path, kind, parameter.shape, lambda: cast(read(), kind, parameter.path))


def _holds(parameter: BoundParameter, dtype: DType) -> bool:
    """Whether every value of a tensor is one of ``dtype``'s."""
    widening = parameter.dtype in DTYPES and dtype is DType.F32
    if widening:
        return True
    values = parameter.read()
    return bool(np.array_equal(cast(values, dtype, parameter.path).astype(values.dtype), values))


def full_config(model: BoundModel, dtype: DType) -> dict[str, Any]:
    """``config.json``, the source's own keys first, in the dialects before and since 5."""
    config = {k: v for k, v in model.checkpoint.config.items() if k not in NOT_CARRIED}
    config.setdefault("architectures", [_class_name(str(config["model_type"]))])
    config["tie_word_embeddings"] = any(p.tied_to for p in model.program.parameters)
    config |= {"dtype": DTYPES[dtype], "torch_dtype": DTYPES[dtype]}
    rope = model.describe.get("rope")
    if isinstance(rope, Mapping):
        config |= both_ropes(rope)
        if rope["kind"] == "default":
            config.pop("rope_scaling", None)
    return config


def both_ropes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a typed config under their names before and since Transformers 5."""
    scaling = {"rope_type": rope["kind"], **dict(rope["settings"])}
    both: dict[str, Any] = {
        "rope_theta": rope["theta"],
        "rope_parameters": {"rope_theta": rope["theta"], **scaling},
    }
    if rope["kind"] != "default":
        both["rope_scaling"] = scaling
    return both


def _class_name(model_type: str) -> str:
    words = model_type.removesuffix("_text").split("_")
    return "".join(word.capitalize() for word in words) + "ForCausalLM"
