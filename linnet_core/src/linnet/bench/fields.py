"""Reading JSON objects field by field: each is checked, and each fault names its place.

Text comes out without characters that move a cursor, turn a line or cannot be written.
"""

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, TypeVar

from linnet.errors import BenchError

MAX_TEXT = 20_000
T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9]{1,40}([-_.][a-z0-9]{1,40}){0,10}")
_UNPRINTABLE = re.compile(
    # An escape sequence goes whole; other control and direction marks, and halves of characters
    # that no encoding writes, are shown as unknown.
    r"(\x1b\[[0-9;?]*[ -/]*[@-~])|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e"
    r"\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def plain(text: str) -> str:
    """Text without what moves a cursor, turns a line or cannot be written."""
    return _UNPRINTABLE.sub(lambda found: "" if found[1] else "\ufffd", text).strip()


def shown(value: Any) -> str:
    """A value as an error names it."""
    text = plain(repr(value))
    return text if len(text) <= 60 else text[:60] + "..."


class Fields:
    """A JSON object of a file, and where in it; whatever does not hold is a BenchError."""

    def __init__(self, values: Mapping[str, Any], file: str, path: str) -> None:
        self.values, self.file, self.path = values, file, path

    def where(self, key: str) -> str:
        """The place of a key, as errors call it."""
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, wanted: str) -> NoReturn:
        """Raise BenchError for the value of a key."""
        found = f"is {shown(self.values[key])}" if key in self.values else "is missing"
        raise BenchError(f"{self.file}: {self.where(key)} {found}; it must be {wanted}")

    def maybe(self, key: str, read: Callable[[str], T]) -> T | None:
        """What ``read`` makes of a key, None where it is null or not there."""
        return None if self.values.get(key) is None else read(key)

    def object(self, key: str) -> "Fields":
        """An object."""
        found = self.values.get(key)
        if not isinstance(found, dict):
            self.fail(key, "an object")
        return Fields(found, self.file, self.where(key))

    def objects(self, key: str, most: int) -> list["Fields"]:
        """A list of objects."""
        found = self.values.get(key)
        if not isinstance(found, list) or len(found) > most:
            self.fail(key, f"a list of {most} or fewer")
        for number, item in enumerate(found):
            if not isinstance(item, dict):
                raise BenchError(f"{self.file}: {self.where(key)}[{number}] is not an object")
        return [
            Fields(item, self.file, f"{self.where(key)}[{number}]")
            for number, item in enumerate(found)
        ]

    def number(self, key: str) -> float:
        """A finite number of 0 or more."""
        return self._number(key, self.values.get(key))

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of them."""
        found = self.values.get(key)
        if not isinstance(found, list):
            self.fail(key, "a list of numbers")
        return tuple(self._number(key, value) for value in found)

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            self.fail(key, "a finite number of 0 or more, below 1e18")
        return float(value)

    def count(self, key: str, least: int = 1) -> int:
        """A whole number."""
        found = self.values.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 1 << 63:
            self.fail(key, f"a whole number of {least} or more")
        return found

    def text(self, key: str) -> str:
        """Text that says something."""
        return self._text(key, self.values.get(key))

    def texts(self) -> dict[str, str]:
        """The object itself, where every value is text."""
        return {plain(key): self.text(key) for key in self.values}

    def list_of_texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        found = self.values.get(key)
        if not isinstance(found, list):
            self.fail(key, "a list of texts")
        return tuple(self._text(key, value) for value in found)

    def _text(self, key: str, value: Any) -> str:
        text = plain(value) if isinstance(value, str) and len(value) <= MAX_TEXT else ""
        if not text:
            self.fail(key, f"text of 1 to {MAX_TEXT} characters")
        return text

    def name(self, key: str) -> str:
        """A key or dtype: what stands in links."""
        found = self.values.get(key)
        if not isinstance(found, str) or not _NAME.fullmatch(found):
            self.fail(key, "a name of a-z, 0-9 and single - _ or . between them")
        return found

    def time(self, key: str) -> datetime:
        """A moment in ISO 8601, with its time zone."""
        try:
            found = datetime.fromisoformat(self.text(key))
        except ValueError:
            self.fail(key, "a moment like 2026-01-31T12:00:00+00:00")
        if found.tzinfo is None:
            self.fail(key, "a moment with its time zone, like 2026-01-31T12:00:00+00:00")
        return found
