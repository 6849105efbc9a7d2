"""Inlining: copying one function's nodes into another with fresh values and full paths."""

import dataclasses

from linnet.spec.program import Attrs, Function, Node, Program, Value


class Inliner:
    """Rebuilds a function node by node."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.count = function.next_index
        self.map: dict[Value, Value] = {}
        self.body: list[Node] = []

    def keep(self, node: Node) -> None:
        """Copy a node as it is."""
        inputs = tuple(self.map.get(value, value) for value in node.inputs)
        self.body.append(dataclasses.replace(node, inputs=inputs))

    def splice(self, node: Node, callee: Function, prefix: str = "") -> None:
        """Put a callee's body in the place of a node; its paths get the prefix."""
        inner = {
            theirs: self.map.get(ours, ours)
            for theirs, ours in zip(callee.inputs, node.inputs, strict=True)
        }
        for step in callee.body:
            outputs = []
            for value in step.outputs:
                inner[value] = Value(self.count, value.type, value.name)
                self.count += 1
                outputs.append(inner[value])
            inputs = tuple(inner[value] for value in step.inputs)
            attrs = _prefixed(step, prefix)
            self.body.append(Node(step.op, inputs, tuple(outputs), attrs, step.where or node.where))
        for ours, theirs in zip(node.outputs, callee.outputs, strict=True):
            self.map[ours] = inner[theirs]

    def finish(self) -> Function:
        """The rebuilt function."""
        outputs = tuple(self.map.get(value, value) for value in self.function.outputs)
        return dataclasses.replace(self.function, body=tuple(self.body), outputs=outputs)


def _prefixed(node: Node, prefix: str) -> Attrs:
    place = {"parameter": "path", "state_read": "state", "state_write": "state"}.get(node.op)
    if node.op in ("call", "loop"):
        place = "at"
    if place is None or not prefix:
        return node.attrs
    return {**node.attrs, place: f"{prefix}.{node.attrs[place]}"}


def inline_entry(program: Program, entry: str) -> Function:
    """One entry with every call and loop written out: parameters and states by full path."""

    def flatten(function: Function) -> Function:
        inliner = Inliner(function)
        for node in function.body:
            if node.op == "call":
                callee = flatten(program.functions[node.attrs["function"]])
                inliner.splice(node, callee, node.attrs["at"])
            elif node.op == "loop":
                callee = flatten(program.functions[node.attrs["function"]])
                step = node
                for index in range(node.attrs["start"], node.attrs["stop"]):
                    inliner.splice(step, callee, f"{node.attrs['at']}.{index}")
                    carried = tuple(inliner.map[value] for value in node.outputs)
                    inputs = (*carried, *node.inputs[len(carried) :])
                    step = dataclasses.replace(node, inputs=inputs)
            else:
                inliner.keep(node)
        return inliner.finish()

    return flatten(program.entries[entry])
