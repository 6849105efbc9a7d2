"""Joining: linears that read the same input become one wider linear and slices of its result.

Query, key and value, and gate and up, are then one product each: fewer and larger reads.
"""

import dataclasses
from collections.abc import Container, Iterator

from linnet.spec.program import Function, Node, Parameter, Program, Value
from linnet.spec.types import DType, TensorType


def join_linears(program: Program) -> Program:
    """The same program with sibling linears joined.

    A joined parameter has ``parts``: the paths whose rows, one after the other, it holds. A
    parameter that some function still reads alone stays in the manifest too.
    """
    known = {parameter.path: parameter for parameter in program.parameters}
    # A tied parameter has no rows of its own to join. What is tied anywhere stays everywhere.
    tied = {local for path, local, _ in _reads(program) if known[path].tied_to is not None}
    functions = {name: _join(function, tied) for name, function in program.functions.items()}
    entries = {name: _join(function, tied) for name, function in program.entries.items()}
    joined = dataclasses.replace(program, functions=functions, entries=entries)

    manifest: dict[str, Parameter] = {}
    for path, local, shape in _reads(joined):
        if path in known:
            manifest[path] = known[path]
        elif path not in manifest:
            prefix = path.removesuffix(local)
            parts = tuple(prefix + part for part in _split(local))
            manifest[path] = Parameter(path, shape, known[parts[0]].role, parts=parts)
    # A parameter that something is tied to stays even if only the tie reads it.
    for parameter in tuple(manifest.values()):
        if parameter.tied_to is not None:
            manifest.setdefault(parameter.tied_to, known[parameter.tied_to])
    return dataclasses.replace(joined, parameters=tuple(manifest.values()))


def _reads(program: Program) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Full path, local path and shape of every parameter read, in order of first use."""

    def visit(function: Function, prefix: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for node in function.body:
            if node.op == "parameter":
                yield prefix + node.attrs["path"], node.attrs["path"], node.attrs["shape"]
            elif node.op == "call":
                callee = program.functions[node.attrs["function"]]
                yield from visit(callee, f"{prefix}{node.attrs['at']}.")
            elif node.op == "loop":
                callee = program.functions[node.attrs["function"]]
                for index in range(node.attrs["start"], node.attrs["stop"]):
                    yield from visit(callee, f"{prefix}{node.attrs['at']}.{index}.")

    for entry in program.entries.values():
        yield from visit(entry, "")


def _joined(paths: list[str]) -> str:
    """``q_proj.weight``, ``k_proj.weight`` -> ``q_proj+k_proj.weight``."""
    owners, leaf = [path.rpartition(".")[0] for path in paths], paths[0].rpartition(".")[2]
    return f"{'+'.join(owners)}.{leaf}"


def _split(path: str) -> list[str]:
    owners, _, leaf = path.rpartition(".")
    return [f"{owner}.{leaf}" for owner in owners.split("+")]


def _join(function: Function, tied: Container[str]) -> Function:
    made = {value: node for node in function.body for value in node.outputs}

    def parameters(node: Node) -> list[Node] | None:
        """The parameter nodes behind a linear's weight and bias, if that is what they are."""
        sources = [made.get(value) for value in node.inputs[1:]]
        found = [
            source
            for source in sources
            if source and source.op == "parameter" and source.attrs["path"] not in tied
        ]
        return found if len(found) == len(sources) else None

    groups: dict[tuple[Value, int], list[Node]] = {}
    for node in function.body:
        if node.op == "linear" and parameters(node):
            groups.setdefault((node.inputs[0], len(node.inputs)), []).append(node)
    groups = {key: nodes for key, nodes in groups.items() if len(nodes) > 1}
    if not groups:
        return function

    count = function.next_index
    replaced = {id(node): key for key, nodes in groups.items() for node in nodes}
    body: list[Node] = []
    done: set[tuple[Value, int]] = set()
    for node in function.body:
        key = replaced.get(id(node))
        if key is None:
            body.append(node)
            continue
        if key in done:
            continue
        done.add(key)
        nodes = groups[key]
        sources = [parameters(member) or [] for member in nodes]
        widths: list[int] = [source[0].attrs["shape"][0] for source in sources]
        total = sum(widths)

        def value(type_: TensorType) -> Value:
            nonlocal count
            count += 1
            return Value(count - 1, type_)

        operands = [node.inputs[0]]
        for members in zip(*sources, strict=True):  # the weights, then the biases if any
            shape = (total, *members[0].attrs["shape"][1:])
            path = _joined([member.attrs["path"] for member in members])
            operands.append(value(TensorType(DType.FLOAT, shape)))
            attrs = {"path": path, "shape": shape}
            body.append(Node("parameter", (), (operands[-1],), attrs, node.where))
        old = node.outputs[0].type
        wide = value(TensorType(old.dtype, (*old.shape[:-1], total)))
        body.append(Node("linear", tuple(operands), (wide,), {}, node.where))
        start = 0
        for member, width in zip(nodes, widths, strict=True):
            bounds = {"axis": -1, "start": start, "stop": start + width}
            body.append(Node("slice", (wide,), member.outputs, bounds, member.where))
            start += width
    return dataclasses.replace(function, body=_drop_unread(tuple(body), function.outputs))


def _drop_unread(body: tuple[Node, ...], outputs: tuple[Value, ...]) -> tuple[Node, ...]:
    read = {value for node in body for value in node.inputs} | set(outputs)
    return tuple(n for n in body if n.op != "parameter" or n.outputs[0] in read)
