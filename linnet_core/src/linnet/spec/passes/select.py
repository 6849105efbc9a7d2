"""Selecting entries: the rest of a program, and what only the rest used, is dropped."""

import dataclasses
from collections.abc import Mapping

from linnet.spec.ops import CALLS
from linnet.spec.program import Function, Program


def select_entries(program: Program, entries: Mapping[str, Function]) -> Program:
    """The program with these entries and the functions they call.

    Its manifest of parameters and its states stay whole: they are what a checkpoint and a cache
    have, whatever is run on them.
    """
    called: set[str] = set()
    waiting = list(entries.values())
    while waiting:
        for node in waiting.pop().body:
            name = node.attrs["function"] if node.op in CALLS else None
            if name is not None and name not in called:
                called.add(name)
                waiting.append(program.functions[name])
    functions = {name: f for name, f in program.functions.items() if name in called}
    return dataclasses.replace(program, functions=functions, entries=dict(entries))
