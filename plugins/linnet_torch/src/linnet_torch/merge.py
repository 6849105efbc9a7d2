"""Merging functions that do the same thing, for sizes that may be more general.

``layer_decode``, which takes ``[R, 1, 48]``, is ``layer_extend``, which takes ``[B, S, 48]``, with
R for B and 1 for S: one function then serves both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from linnet.spec.ops import CALLS
from linnet.spec.program import Function, Node, Program, Value
from linnet.spec.types import Dim


def merge(program: Program) -> Program:
    """Functions that do the same thing become one: the one whose sizes are the more general."""
    known: dict[str, str] = {}
    functions: dict[str, Function] = {}
    for name, function in program.functions.items():
        renamed = _renamed(function, known)
        general = next((g for g in functions.values() if is_instance(renamed, g)), None)
        known[name] = name if general is None else general.name
        if general is None:
            functions[name] = renamed
    names = _short_names(functions)
    functions = {names[n]: _renamed(f, names, names[n]) for n, f in functions.items()}
    final = {name: names[other] for name, other in known.items()}
    entries = {name: _renamed(entry, final) for name, entry in program.entries.items()}
    return dataclasses.replace(program, functions=functions, entries=entries)


def _renamed(function: Function, names: Mapping[str, str], name: str = "") -> Function:
    body = tuple(
        dataclasses.replace(node, attrs={**node.attrs, "function": names[node.attrs["function"]]})
        if node.op in CALLS
        else node
        for node in function.body
    )
    return dataclasses.replace(function, name=name or function.name, body=body)


def _short_names(functions: Mapping[str, Function]) -> dict[str, str]:
    """``layer_extend``, which uses a cache and now serves every entry, is ``layer_cached``."""
    names: dict[str, str] = {}
    for name in functions:
        base = min((other for other in functions if _is_variant(name, other)), key=len)
        short = base if base == name else f"{base}_cached"
        names[name] = name if short in names.values() else short
    return names


def _is_variant(name: str, base: str) -> bool:
    return name == base or name.startswith(f"{base}_")


def is_instance(function: Function, general: Function) -> bool:
    """Whether ``function`` is ``general`` for particular sizes."""
    sizes: dict[str, Dim] = {}
    same: dict[Value, Value] = {}

    def fits(theirs: Any, ours: Any) -> bool:
        if isinstance(theirs, tuple) and isinstance(ours, tuple):
            return len(theirs) == len(ours) and all(map(fits, theirs, ours))
        if isinstance(theirs, str) and isinstance(ours, str | int):
            return sizes.setdefault(theirs, ours) == ours
        return bool(theirs == ours)

    def pair(theirs: Sequence[Value], ours: Sequence[Value]) -> bool:
        if len(theirs) != len(ours):
            return False
        for g, f in zip(theirs, ours, strict=True):
            if g.type.dtype is not f.type.dtype or not fits(g.type.shape, f.type.shape):
                return False
            same[g] = f
        return True

    if not pair(general.inputs, function.inputs) or len(general.body) != len(function.body):
        return False
    for g, f in zip(general.body, function.body, strict=True):
        if g.op != f.op or tuple(same[v] for v in g.inputs) != f.inputs:
            return False
        if not _same_attrs(g, f, fits) or not pair(g.outputs, f.outputs):
            return False
    return tuple(same[value] for value in general.outputs) == function.outputs


def _same_attrs(general: Node, node: Node, fits: Any) -> bool:
    """Sizes may be particular, everything else must be equal."""
    if general.attrs.keys() != node.attrs.keys():
        return False
    sizes = {"shape", "size", "context"}
    return all(
        fits(value, node.attrs[name]) if name in sizes else value == node.attrs[name]
        for name, value in general.attrs.items()
    )
