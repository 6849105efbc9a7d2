"""What the attributes of ops may be: checked as a family is traced and as a program is read.

A program may come from a stranger's file, and backends write source code from it. So every
name in it is an identifier, every path is made of plain words, every number is finite.
"""

import inspect
import keyword
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from reprlib import repr as short
from typing import Any

from linnet.spec.types import DType

PATH = re.compile(r"[\w+-]+(\.[\w+-]+)*", re.ASCII)
"""``model.layers.0.self_attn``; a ``+`` stands between what a pass has joined."""
LARGEST = 2**64
"""Integers stay below."""


class Mismatch(Exception):  # noqa: N818 - it never leaves the spec
    """A rule's complaint, before the tracer or the checker adds where it happened."""


def require(condition: bool, complaint: str) -> None:
    """Raise ``Mismatch(complaint)`` unless the condition holds."""
    if not condition:
        raise Mismatch(complaint)


def is_name(value: Any) -> bool:
    """Whether it is a Python identifier in ASCII, and not a keyword."""
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isidentifier()
        and not keyword.iskeyword(value)
    )


def is_path(value: Any) -> bool:
    """Whether it is words joined by dots."""
    return isinstance(value, str) and PATH.fullmatch(value) is not None


def is_int(value: Any) -> bool:
    """Whether it is an integer of up to 64 bits, and not a boolean."""
    return type(value) is int and -LARGEST < value < LARGEST


def is_number(value: Any) -> bool:
    """Whether it is an integer or a finite float, and not a boolean."""
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def is_size(value: Any) -> bool:
    """Whether it is a positive integer or a symbolic size's name."""
    return is_name(value) or (is_int(value) and value > 0)


def _tuple_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(holds, value))


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "path": (is_path, "a path"),
    "state": (is_path, "a path"),
    "at": (is_path, "a path"),
    "function": (is_name, "a function's name"),
    "shape": (_tuple_of(is_size), "a tuple of sizes"),
    "size": (is_size, "a size"),
    "dtype": (lambda value: isinstance(value, str) and value in list(DType), "a dtype"),
    "values": (_tuple_of(lambda value: is_number(value) or value is True or value is False),
               "a tuple of finite numbers"),
    "axes": (_tuple_of(is_int), "a tuple of integers"),
    "axis": (is_int, "an integer"),
    "start": (is_int, "an integer"),
    "stop": (is_int, "an integer"),
}  # fmt: skip
"""The attributes of primitives and calls, which mean the same in each of them."""


def check_attrs(names: Collection[str], attrs: Mapping[str, Any]) -> None:
    """Raise Mismatch unless a primitive's or a call's attributes are these, each of its kind."""
    if set(attrs) != set(names):
        wanted, given = (", ".join(sorted(each)) or "none" for each in (names, attrs))
        raise Mismatch(f"takes the attributes {wanted}, not {given}")
    for name, value in attrs.items():
        holds, kind = _KINDS[name]
        require(holds(value), f"{name} is {short(value)}, not {kind}")


def check_arguments(signature: inspect.Signature, inputs: int, attrs: Mapping[str, Any]) -> None:
    """Raise Mismatch unless a composite's body can be called with so many inputs and these attrs.

    What an attribute may be is what its annotation says.
    """
    try:
        signature.bind(*(None,) * inputs, **attrs)
    except TypeError as error:
        raise Mismatch(str(error)) from None
    for name, value in attrs.items():
        parameter = signature.parameters[name]
        require(
            parameter.kind is inspect.Parameter.KEYWORD_ONLY,
            f"{name} is an input, not an attribute: pass it by position",
        )
        require(
            _fits(value, parameter.annotation),
            f"{name} is {short(value)}, not {inspect.formatannotation(parameter.annotation)}",
        )


def _fits(value: Any, annotation: Any) -> bool:
    if annotation is float:
        return is_number(value)
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return type(value) is annotation
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if isinstance(annotation, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    raise TypeError(f"an attribute cannot be {annotation}: use numbers, str, bool and tuples")
