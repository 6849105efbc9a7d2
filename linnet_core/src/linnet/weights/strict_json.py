"""JSON that strangers wrote: objects only, no key twice, no file too large to be one."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from linnet.errors import CheckpointError

MAX_BYTES = 200 << 20
"""More than any text file of a model; tokenizers with large vocabularies reach tens of MB."""


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON. Raises ValueError for anything else, a repeated key included."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} is there twice")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for a JSON file of a model")
        data = loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, not an object")
    return data
