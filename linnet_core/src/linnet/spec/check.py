"""Checking a program: every rule that a traced program keeps, for programs that come as JSON."""

from collections.abc import Mapping

from linnet.errors import SpecError
from linnet.spec.composites import COMPOSITES, infer_body
from linnet.spec.ops import PRIMITIVES, Mismatch
from linnet.spec.program import Function, Node, Program, Value
from linnet.spec.types import Dim, TensorType


def check(program: Program) -> None:
    """Raise SpecError unless the program is well typed and complete.

    Values are defined once and before use; every node obeys its op's rule; calls fit their
    callee; every parameter and state that is reached exists with that shape, and every one that
    exists is reached; every symbolic size can be read off an input or a state.
    """
    known: dict[str, Function] = {}
    for function in program.functions.values():
        _check_function(function, known)
        known[function.name] = function
    for entry in program.entries.values():
        _check_function(entry, known)
    _check_paths(program)


def _complain(function: Function, node: Node, complaint: str) -> SpecError:
    shapes = ", ".join(str(value.type) for value in node.inputs)
    where = f" ({node.where})" if node.where else ""
    return SpecError(f"{function.name}: {node.op}({shapes}): {complaint}{where}")


def _check_function(function: Function, known: Mapping[str, Function]) -> None:
    defined = set(function.inputs)
    indices = [value.index for value in function.inputs]
    sizes = {size for value in function.inputs for size in value.type.shape}
    for node in function.body:
        for value in node.inputs:
            if value not in defined:
                raise _complain(function, node, f"%{value.index} is not defined before it is used")
        try:
            types = _results(node, known)
        except (Mismatch, KeyError, TypeError, ValueError) as complaint:
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
        rule = PRIMITIVES[node.op]
        if set(node.attrs) != set(rule.attrs):
            raise Mismatch(f"takes attributes {sorted(rule.attrs)}, not {sorted(node.attrs)}")
        return rule.infer(types, node.attrs)
    if node.op in COMPOSITES:
        return tuple(value.type for value in infer_body(node.op, types, node.attrs).outputs)
    if node.op in ("call", "loop"):
        name = node.attrs["function"]
        if name not in known:
            raise Mismatch(f"there is no function {name!r} before it")
        callee = known[name]
        wanted = tuple(value.type for value in callee.inputs)
        if types != wanted:
            raise Mismatch(f"{name} takes {', '.join(map(str, wanted))}")
        results = tuple(value.type for value in callee.outputs)
        if node.op == "loop" and (
            results != types[: len(results)] or not 0 <= node.attrs["start"] < node.attrs["stop"]
        ):
            raise Mismatch(f"{name} cannot be looped: its results are not its first inputs")
        return results
    raise Mismatch("is neither a primitive, a composite, a call nor a loop")


def _check_paths(program: Program) -> None:
    shapes: dict[tuple[str, str], tuple[object, ...]] = {}
    for kind, things in (
        ("parameter", [(p.path, p.shape) for p in program.parameters]),
        ("state", [(s.path, s.type.shape) for s in program.states]),
    ):
        for path, shape in things:
            if (kind, path) in shapes:
                raise SpecError(f"{kind} {path} is declared twice")
            shapes[kind, path] = shape
    for parameter in program.parameters:
        if parameter.tied_to is not None:
            other = shapes.get(("parameter", parameter.tied_to))
            if other != parameter.shape:
                raise SpecError(
                    f"parameter {parameter.path} {list(parameter.shape)} is tied to "
                    f"{parameter.tied_to}, which is {list(other) if other else 'not there'}"
                )

    reached: set[tuple[str, str]] = set()
    visited: set[tuple[str, str]] = set()

    def visit(function: Function, prefix: str) -> None:
        if (function.name, prefix) in visited:
            return
        visited.add((function.name, prefix))
        for node in function.body:
            if node.op == "parameter":
                reach("parameter", prefix + node.attrs["path"], function, node)
            elif node.op in ("state_read", "state_write"):
                reach("state", prefix + node.attrs["state"], function, node)
            elif node.op == "call":
                visit(program.functions[node.attrs["function"]], f"{prefix}{node.attrs['at']}.")
            elif node.op == "loop":
                for index in range(node.attrs["start"], node.attrs["stop"]):
                    callee = program.functions[node.attrs["function"]]
                    visit(callee, f"{prefix}{node.attrs['at']}.{index}.")

    def reach(kind: str, path: str, function: Function, node: Node) -> None:
        if (kind, path) not in shapes:
            raise _complain(function, node, f"there is no {kind} {path}")
        if shapes[kind, path] != tuple(node.attrs["shape"]):
            declared = list(shapes[kind, path])
            raise _complain(
                function, node, f"{kind} {path} is {declared}, not {list(node.attrs['shape'])}"
            )
        reached.add((kind, path))

    for entry in program.entries.values():
        visit(entry, "")
    for kind, path in shapes:
        if (kind, path) not in reached:
            raise SpecError(f"{kind} {path} is declared but never used")


def values_of(function: Function) -> dict[int, Value]:
    """Every value of a function by index."""
    values = {value.index: value for value in function.inputs}
    for node in function.body:
        values.update((value.index, value) for value in node.outputs)
    return values
