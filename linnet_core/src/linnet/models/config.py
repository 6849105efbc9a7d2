"""Reading a Transformers config strictly: values are typed, and defaults are never silent."""

from collections.abc import Mapping
from typing import Any, TypeVar

from linnet.errors import ConfigError

T = TypeVar("T")


class Reader:
    """Reads values out of a ``config.json`` and remembers what was read and what was assumed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.read: set[str] = set()
        self.notes: list[str] = []

    def optional(self, name: str, type_: type[T]) -> T | None:
        """The value, or None where it is absent or null. An int will do for a float."""
        self.read.add(name)
        value = self.config.get(name)
        if value is None:
            return None
        if type_ is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
            raise ConfigError(f"config.json: {name} is {value!r}, not of type {type_.__name__}")
        return value

    def required(self, name: str, type_: type[T]) -> T:
        """The value; ConfigError where it is missing."""
        value = self.optional(name, type_)
        if value is None:
            raise ConfigError(f"config.json does not state {name}, which this family needs")
        return value

    def default(self, name: str, value: T) -> T:
        """The value, or a stated default with a note that it was assumed."""
        given = self.optional(name, type(value))
        if given is not None:
            return given
        self.notes.append(f"config.json does not state {name}; assuming {value!r}")
        return value

    def size(self, name: str, *, at_least: int = 1) -> int:
        """A required count."""
        value = self.required(name, int)
        if value < at_least:
            raise ConfigError(f"config.json: {name} is {value}, not at least {at_least}")
        return value
