"""JSON and text that strangers wrote: objects, no key twice, nothing too large to be one."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from linnet.errors import CheckpointError
from linnet.weights.paths import reading

MAX_BYTES = 200 << 20
"""More than any text file of a model; tokenizers with large vocabularies reach tens of MB."""


def loads(data: bytes | str) -> dict[str, Any]:
    """The object in UTF-8 JSON. Raises ValueError for anything else, a repeated key included."""
    text = data if isinstance(data, str) else data.decode()
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{type(found).__name__}, not an object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError for anything else."""
    text = read_text(path)
    try:
        return loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON object: {error}") from None


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises CheckpointError for anything else."""
    with reading(path):
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes are too many for a text file of a model")
        data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None
