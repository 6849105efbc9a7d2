"""Expanding: composites become their canonical bodies, unless a backend claims them."""

import dataclasses
from collections.abc import Container

from linnet.spec.composites import COMPOSITES, body_of
from linnet.spec.passes.inline import Inliner
from linnet.spec.program import Function, Program


def expand(program: Program, claimed: Container[str] = ()) -> Program:
    """The same program with every composite outside ``claimed`` written out, all the way down.

    With nothing claimed, what remains is primitives, calls and loops.
    """
    return dataclasses.replace(
        program,
        functions={n: expand_function(f, claimed) for n, f in program.functions.items()},
        entries={n: expand_function(f, claimed) for n, f in program.entries.items()},
    )


def expand_function(function: Function, claimed: Container[str] = ()) -> Function:
    """One function with its unclaimed composites written out."""
    inliner = Inliner(function)
    for node in function.body:
        if node.op in COMPOSITES and node.op not in claimed:
            body = expand_function(body_of(node), claimed)
            inliner.splice(node, body)
        else:
            inliner.keep(node)
    return inliner.finish()
