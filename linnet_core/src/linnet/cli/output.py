"""What the commands print with: results on stdout, everything else on stderr."""

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any


def print_json(value: Any) -> None:
    """Print a result as JSON, the only thing on stdout under ``--json``.

    Dataclasses become objects, sets become sorted lists, paths strings. JSON has no infinities
    and no NaN: they become null.
    """
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What would move a terminal's cursor or colour it: messages quote strangers' files."""


def note(message: str) -> None:
    """Tell the user something that is not the result."""
    print(_CONTROL.sub(lambda found: repr(found[0])[1:-1], message), file=sys.stderr, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a NumPy array or number, without importing NumPy to ask
        return _plain(value.tolist())
    return str(value)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns as wide as they need to be, the last one as it comes."""
    lines = [header, *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)][:-1]
    for *cells, last in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        print("  ".join([*padded, last]).rstrip())
