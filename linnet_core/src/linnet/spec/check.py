"""Checking a program: every rule that a traced program keeps, for programs that come as JSON."""

from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from linnet.errors import SpecError
from linnet.spec.attrs import Mismatch, check_attrs, is_name, is_path, is_size
from linnet.spec.composites import COMPOSITES, infer_body
from linnet.spec.ops import CALLS, PRIMITIVES, infer
from linnet.spec.program import CONTEXT, ROWS, Function, Node, Program
from linnet.spec.types import Dim, DType, TensorType

MAX_DEPTH = 32
"""How deep calls may nest."""
MAX_STEPS = 10_000_000
"""How many nodes all entries may have with calls and loops written out."""


def check(program: Program) -> None:
    """Raise SpecError unless the program is well typed and complete.

    Names are identifiers and paths are words joined by dots. Values are defined once and before
    use; every node obeys its op's rule; calls fit their callee, which comes first; every
    parameter and state that is reached exists with that shape, and every one that exists is
    reached; every symbolic size can be read off an input or a state; written out, the program
    stays within ``MAX_DEPTH`` and ``MAX_STEPS``.
    """
    _check_names(program)
    known: dict[str, Function] = {}
    for function in program.functions.values():
        _check_function(function, known)
        known[function.name] = function
    for entry in program.entries.values():
        _check_function(entry, known)
    _check_extent(program)
    _check_declarations(program)
    _check_reached(program)


def _check_names(program: Program) -> None:
    """Backends write these into source code."""

    def named() -> Iterator[tuple[str, Any, bool]]:
        yield "family", program.family, is_name(program.family)
        for table in (program.functions, program.entries):
            for name, function in table.items():
                yield "function", name, is_name(name) and name == function.name
                values = [*function.inputs, *(v for n in function.body for v in n.outputs)]
                for value in values:
                    yield f"value of {name}", value.name, value.name == "" or is_name(value.name)
                for node in function.body:
                    yield f"line in {name}", node.where, node.where.isprintable()
        for parameter in program.parameters:
            yield "role", parameter.role, is_name(parameter.role)
            for path in (parameter.path, *parameter.parts):
                yield "parameter", path, is_path(path)
            tied = parameter.tied_to
            yield "parameter", tied, tied is None or is_path(tied)
        for state in program.states:
            yield "state", state.path, is_path(state.path)

    for what, name, fits in named():
        if not fits:
            raise SpecError(f"{short(name)} cannot name a {what}")
    for entry in program.entries.values():
        names = [value.name for value in entry.inputs]
        if "" in names or len(set(names)) != len(names):
            raise SpecError(f"the inputs of entry {entry.name} need a name each, not {names}")


def _complain(function: Function, node: Node, complaint: str) -> SpecError:
    shapes = ", ".join(str(value.type) for value in node.inputs)
    where = f" ({node.where})" if node.where else ""
    return SpecError(f"{function.name}: {node.op}({shapes}): {complaint}{where}")


def _check_function(function: Function, known: Mapping[str, Function]) -> None:
    for value in function.inputs:
        if not all(map(is_size, value.type.shape)):
            raise SpecError(f"{function.name}: {value.type} is no type for %{value.index}")
    defined = set(function.inputs)
    indices = [value.index for value in function.inputs]
    sizes = {size for value in function.inputs for size in value.type.shape}
    for node in function.body:
        for value in node.inputs:
            if value not in defined:
                raise _complain(function, node, f"%{value.index} is not defined before it is used")
        try:
            types = _results(node, known)
        except Mismatch as complaint:
            raise _complain(function, node, str(complaint)) from None
        if types != tuple(value.type for value in node.outputs):
            got = ", ".join(str(value.type) for value in node.outputs)
            raise _complain(
                function, node, f"gives {', '.join(map(str, types))}, but is declared as {got}"
            )
        for size in _named_sizes(node):
            if isinstance(size, str) and size not in sizes:
                raise _complain(function, node, f"the size {size} is on no input or state of it")
        sizes.update(size for value in node.outputs for size in value.type.shape)
        defined.update(node.outputs)
        indices.extend(value.index for value in node.outputs)
    if len(set(indices)) != len(indices):
        raise SpecError(f"{function.name}: a value is defined twice")
    for value in function.outputs:
        if value not in defined:
            raise SpecError(f"{function.name}: its result %{value.index} is not defined")


def _named_sizes(node: Node) -> tuple[Dim, ...]:
    """Sizes that an op makes up rather than takes from its inputs."""
    if node.op == "iota":
        return (node.attrs["size"],)
    return tuple(node.attrs["shape"]) if node.op == "broadcast" else ()


def _results(node: Node, known: Mapping[str, Function]) -> tuple[TensorType, ...]:
    types = tuple(value.type for value in node.inputs)
    if node.op in PRIMITIVES:
        return infer(node.op, types, node.attrs)
    if node.op in COMPOSITES:
        return tuple(value.type for value in infer_body(node.op, types, node.attrs).outputs)
    if node.op in CALLS:
        check_attrs(CALLS[node.op], node.attrs)
        name = node.attrs["function"]
        if name not in known:
            raise Mismatch(f"there is no function {name!r} before it")
        callee = known[name]
        wanted = tuple(value.type for value in callee.inputs)
        if types != wanted:
            raise Mismatch(f"{name} takes {', '.join(map(str, wanted))}")
        results = tuple(value.type for value in callee.outputs)
        if node.op == "loop":
            start, stop = node.attrs["start"], node.attrs["stop"]
            if not 0 <= start < stop:
                raise Mismatch(f"{start} to {stop} is no range of blocks")
            if results != types[: len(results)]:
                raise Mismatch(f"{name} cannot be looped: its results are not its first inputs")
        return results
    raise Mismatch("is neither a primitive, a composite, a call nor a loop")


def _check_extent(program: Program) -> None:
    """A short program may call its way to any length: refuse what could not be written out."""
    depths: dict[str, int] = {}
    steps: dict[str, int] = {}

    def measure(function: Function) -> tuple[int, int]:
        depth = total = 0
        for node in function.body:
            total += 1
            if node.op in CALLS:
                callee = node.attrs["function"]
                depth = max(depth, depths[callee] + 1)
                total += _repeats(node) * (1 + steps[callee])
        if depth > MAX_DEPTH:
            raise SpecError(f"{function.name}: calls nest {depth} deep, more than {MAX_DEPTH}")
        return depth, total

    for function in program.functions.values():
        depths[function.name], steps[function.name] = measure(function)
    total = sum(measure(entry)[1] for entry in program.entries.values())
    if total > MAX_STEPS:
        raise SpecError(f"written out, the entries have {total} nodes, more than {MAX_STEPS}")


def _repeats(node: Node) -> int:
    return node.attrs["stop"] - node.attrs["start"] if node.op == "loop" else 1


def _check_declarations(program: Program) -> None:
    parameters = {parameter.path: parameter for parameter in program.parameters}
    if len(parameters) != len(program.parameters):
        raise SpecError("a parameter is declared twice")
    for path, parameter in parameters.items():
        if not all(is_size(size) and isinstance(size, int) for size in parameter.shape):
            raise SpecError(f"parameter {path}: {short(parameter.shape)} is no shape")
        if parameter.tied_to is None:
            continue
        other = parameters.get(parameter.tied_to)
        if other is None or other.tied_to is not None:
            raise SpecError(
                f"parameter {path} is tied to {short(parameter.tied_to)}, which stores nothing"
            )
        if other.shape != parameter.shape:
            raise SpecError(
                f"parameter {path} {list(parameter.shape)} is tied to {other.path}, which is "
                f"{list(other.shape)}"
            )
    if len({state.path for state in program.states}) != len(program.states):
        raise SpecError("a state is declared twice")
    for state in program.states:
        lead, rest = state.type.shape[:2], state.type.shape[2:]
        fixed = all(is_size(size) and isinstance(size, int) for size in rest)
        if state.type.dtype is not DType.FLOAT or lead != (ROWS, CONTEXT) or not fixed:
            raise SpecError(
                f"state {state.path} is {state.type}, not {DType.FLOAT}[{ROWS}, {CONTEXT}, ...]"
            )


def _check_reached(program: Program) -> None:
    shapes: dict[tuple[str, str], tuple[Dim, ...]] = {}
    shapes.update({("parameter", p.path): p.shape for p in program.parameters})
    shapes.update({("state", s.path): s.type.shape for s in program.states})
    reached: set[tuple[str, str]] = set()
    visited: set[tuple[str, str]] = set()
    reaching = _reaching(program)

    def visit(function: Function, prefix: str) -> None:
        if (function.name, prefix) in visited:
            return
        visited.add((function.name, prefix))
        for node in function.body:
            if node.op in PLACES:
                kind, name = PLACES[node.op]
                reach(kind, prefix + node.attrs[name], function, node)
            elif node.op in CALLS and node.attrs["function"] in reaching:
                callee = program.functions[node.attrs["function"]]
                for place in _places(node):
                    visit(callee, f"{prefix}{place}.")

    def reach(kind: str, path: str, function: Function, node: Node) -> None:
        declared = shapes.get((kind, path))
        if declared is None:
            raise _complain(function, node, f"there is no {kind} {path}")
        if declared != node.attrs["shape"]:
            raise _complain(
                function,
                node,
                f"{kind} {path} is {list(declared)}, not {list(node.attrs['shape'])}",
            )
        reached.add((kind, path))

    for entry in program.entries.values():
        visit(entry, "")
    # What a reached parameter is tied to holds its values, read or not.
    tied = {p.path: p.tied_to for p in program.parameters if p.tied_to is not None}
    reached |= {("parameter", tied[path]) for kind, path in reached if path in tied}
    for kind, path in shapes:
        if (kind, path) not in reached:
            raise SpecError(f"{kind} {path} is declared but never used")


PLACES = {
    "parameter": ("parameter", "path"),
    "state_read": ("state", "state"),
    "state_write": ("state", "state"),
}


def _reaching(program: Program) -> set[str]:
    """Functions that reach a parameter or state, themselves or through calls.

    Only those are visited at all their places, so that the visits stay as few as the declarations.
    """
    reaching: set[str] = set()
    for name, function in program.functions.items():
        for node in function.body:
            if node.op in PLACES or node.attrs.get("function") in reaching:
                reaching.add(name)
                break
    return reaching


def _places(node: Node) -> Iterator[str]:
    at = node.attrs["at"]
    if node.op == "call":
        yield at
    else:
        yield from (f"{at}.{index}" for index in range(node.attrs["start"], node.attrs["stop"]))
