"""A seeded random checkpoint of a model's shape, for what needs shapes and not a trained model.

It is a folder as Transformers writes one, without a tokenizer. Equal seeds give equal values for
each tensor by itself (with one version of NumPy): order, shards and other tensors do not matter.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import SourceError
from linnet.plugins.manager import plugin_manager
from linnet.spec.program import Parameter
from linnet.spec.types import DType
from linnet.weights.checkpoint import Array, class_name
from linnet.weights.dtypes import numpy_dtype
from linnet.weights.encodings import Encodings, encoded, stored_shape
from linnet.weights.safetensors import Entry, write_sharded, write_text

DTYPES = {DType.BF16: "bfloat16", DType.F32: "float32", DType.F16: "float16"}
"""The dtypes a checkpoint can have, and what Transformers calls them."""
_CHUNK = 1 << 20  # values drawn at a time: a tensor's f32 copy never exists whole


def write_random(
    config: Mapping[str, Any],
    folder: Path,
    *,
    seed: int,
    dtype: str = "bf16",
    max_shard_bytes: int = 4 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a random checkpoint for ``config`` (Transformers dialect) to ``folder``.

    Weights are normal with standard deviation 0.02, norm scales uniform in 1 ± 0.05, so that a
    forward pass stays finite. ``progress`` is told the bytes written and the bytes in all. The
    folder appears when it is whole. Raises SourceError for a folder that is not empty, an unknown
    dtype, a negative seed or too little room; ConfigError for a config no program can be built of.
    """
    if dtype not in DTYPES:
        raise SourceError(f"dtype is {dtype!r}; a random checkpoint is {', '.join(DTYPES)}")
    if seed < 0:
        raise SourceError(f"seed is {seed}; it must be 0 or more")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SourceError(f"{folder} exists and is not an empty folder; name another")
    parameters, encodings = _parameters(config)
    total = sum(math.prod(p.shape) for p in parameters) * DType(dtype).itemsize
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < total:
        raise SourceError(f"{folder.parent} has {free} bytes free; the checkpoint takes {total}")

    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write_text(beside / "config.json", json.dumps(_full_config(config, dtype), indent=2) + "\n")
        entries = _entries(parameters, encodings, seed, DType(dtype), total, progress)
        write_sharded(beside, entries, max_shard_bytes=max_shard_bytes, metadata={"format": "pt"})
        beside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _parameters(config: Mapping[str, Any]) -> tuple[list[Parameter], Encodings]:
    """What a checkpoint of this config stores, and which of it otherwise than the program."""
    manager = plugin_manager()
    model_type = str(config.get("model_type"))
    able = [family for family in manager.families.values() if model_type in family.model_types]
    family = able[0] if able else manager.family(model_type)  # which says what is missing
    implementation = manager.implementation(family)
    parameters = [p for p in implementation.program(config).parameters if p.tied_to is None]
    return parameters, getattr(implementation, "encodings", {})


def _full_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config.json`` for readers of both dialects, before and since Transformers 5."""
    full: dict[str, Any] = {"architectures": [class_name(str(config["model_type"]))]}
    full |= dict(config)
    if "rope_local_base_freq" in full and "rope_parameters" not in full:
        full["rope_parameters"] = {
            "full_attention": {"rope_theta": full["rope_theta"], "rope_type": "default"},
            "sliding_attention": {
                "rope_theta": full["rope_local_base_freq"],
                "rope_type": "default",
            },
        }
    elif "rope_theta" in full and "rope_parameters" not in full:
        scaling = full.get("rope_scaling") or {"rope_type": "default"}
        full["rope_parameters"] = {"rope_theta": full["rope_theta"], **scaling}
    return full | {"dtype": DTYPES[DType(dtype)], "torch_dtype": DTYPES[DType(dtype)]}


def _entries(
    parameters: list[Parameter],
    encodings: Encodings,
    seed: int,
    dtype: DType,
    total: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Entry]:
    done = 0

    def reader(parameter: Parameter) -> Callable[[], Array]:
        def read() -> Array:
            nonlocal done
            values = encoded(parameter.path, random_values(parameter, seed, dtype), encodings)
            done += values.nbytes
            if progress:
                progress(done, total)
            return values

        return read

    for parameter in parameters:
        shape = stored_shape(parameter.path, parameter.shape, encodings)
        yield Entry(parameter.path, dtype, shape, reader(parameter))


def random_values(parameter: Parameter, seed: int, dtype: DType) -> Array:
    """One parameter's values, drawn in f32 from a stream of its own and rounded to ``dtype``."""
    key = hashlib.sha256(parameter.path.encode()).digest()
    words = [int(word) for word in np.frombuffer(key, "<u4")]
    draw = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, *words])))
    values: Array = np.empty(math.prod(parameter.shape), numpy_dtype(dtype))
    buffer = np.empty(min(_CHUNK, values.size), np.float32)
    for start in range(0, values.size, _CHUNK):
        part = buffer[: values.size - start]
        if parameter.role == "scale":
            draw.random(out=part, dtype=np.float32)
            part *= 0.1
            part += 0.95
        else:
            draw.standard_normal(out=part, dtype=np.float32)
            part *= 0.02
        values[start : start + part.size] = part
    return values.reshape(parameter.shape)
