"""From a program to the program that is written as PyTorch: the same functions, with ops of ours.

What a person would compute once and pass to every layer (which cache positions are written, which
keys are visible) becomes an op of its own and is hoisted out of the layers. Functions that then do
the same thing become one, and an entry that goes on from another entry calls it. Knows programs;
knows no PyTorch.

The ops added to those of the spec, by their inputs:

========== =========================== ==========================================================
end        ()                          how many positions of the cache are in play (a number)
dtype      ()                          the run's dtype
slots      starts, lengths, end, rows? where a call writes, and which rows it reads
visible    positions, end?             which keys queries at these positions see
update     x, slots                    write to a state, and read it back
write      x, slots                    write to a state
read       end, rows?                  read a state
attend     q, k, v, visible            attention
entry      an entry's                  another entry of the program
========== =========================== ==========================================================
"""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from linnet.spec.ops import CALLS
from linnet.spec.passes.expand import expand
from linnet.spec.program import CONTEXT, Function, Node, Program, Value
from linnet.spec.types import Dim, DType, TensorType
from linnet_torch.merge import merge
from linnet_torch.starts import mark_starts

HOISTED = ("end", "dtype", "slots", "visible")
STATE_OPS = ("update", "write", "read")

OPAQUE = TensorType(DType.BOOL, ())
"""The type of what is no tensor: a number of positions, slots, visible keys, a dtype."""


def lower(program: Program, claimed: Container[str], *, starts: bool = True) -> Program:
    """The program to write as source, the composites outside ``claimed`` written out.

    ``starts`` has entries take the position where all rows start, if they do.
    """
    program = expand(share_entries(program), claimed)
    program = merge(drop_unused(hoist(program)))
    entries = {
        name: sink(mark_starts(entry) if starts else entry)
        for name, entry in program.entries.items()
    }
    return dataclasses.replace(program, entries=entries)


# --- entries that go on from another ----------------------------------------------------------


def share_entries(program: Program) -> Program:
    """An entry that begins with the whole of another one calls it instead."""
    entries: dict[str, Function] = {}
    for name, entry in program.entries.items():
        for other in entries.values():
            rest = _rest(entry, other)
            if rest is not None:
                call = Node("entry", other.inputs, other.outputs, {"entry": other.name})
                entry = dataclasses.replace(entry, body=(call, *rest))  # noqa: PLW2901
                break
        entries[name] = entry
    return dataclasses.replace(program, entries=entries)


def _rest(entry: Function, other: Function) -> tuple[Node, ...] | None:
    """What ``entry`` does after all that ``other`` does, or None if it does not begin with it."""
    count = len(other.body)
    if entry.body[:count] != other.body or entry.inputs[: len(other.inputs)] != other.inputs:
        return None
    rest = entry.body[count:]
    known = {*entry.inputs, *other.outputs, *(v for node in rest for v in node.outputs)}
    used = {*entry.outputs, *(v for node in rest for v in node.inputs)}
    return rest if rest and used <= known else None


# --- hoisting ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Hoisted:
    """A node that a function's callers compute for it; ``inputs`` are places in its signature."""

    node: Node
    inputs: tuple[int, ...]


def opaque_kind(value: Value) -> str:
    """What kind of thing a hoisted value is: its name without a number."""
    return value.name.rstrip("0123456789")


class _Rewriter:
    """Rebuilds one function in our ops, and takes out of it what its callers can compute."""

    def __init__(self, function: Function, hoisted: Mapping[str, Sequence[_Hoisted]]) -> None:
        self.function = function
        self.hoisted = hoisted
        used = [v.index for n in function.body for v in (*n.inputs, *n.outputs)]
        used += [v.index for v in function.inputs]
        self.count = 1 + max(used, default=-1)
        self.map: dict[Value, Value] = {}
        self.body: list[Node] = []
        self.shared: dict[tuple[Any, ...], Value] = {}

    def emit(self, op: str, inputs: Sequence[Value], name: str = "", **attrs: Any) -> Value:
        """One of our hoisted ops, or the equal one that is there already."""
        key = (op, tuple(inputs), tuple(attrs.items()))
        if key not in self.shared:
            value = Value(self.count, OPAQUE, self._free(name))
            self.count += 1
            self.body.append(Node(op, tuple(inputs), (value,), attrs))
            self.shared[key] = value
        return self.shared[key]

    def _free(self, name: str) -> str:
        """The name, or with a number: layers with other windows see other keys."""
        taken = {value.name for value in self.shared.values()}
        number, free = 1, name
        while name and free in taken:
            number += 1
            free = f"{name}{number}"
        return free

    def rebuild(self) -> None:
        """Every node, in our ops."""
        for index, node in enumerate(self.function.body):
            if any(value in self.map for value in node.outputs):
                continue  # a read that became part of an update
            inputs = tuple(self.map.get(value, value) for value in node.inputs)
            match node.op:
                case "state_write":
                    self._write(index, node, inputs)
                case "state_read":
                    operands = (self.emit("end", (), "end"), *inputs)
                    attrs = self._state(index, node)
                    self.body.append(Node("read", operands, node.outputs, attrs))
                case "attention":
                    q, k, v, positions = inputs
                    visible = self._visible(positions, k.type.shape[1], node.attrs.get("window"))
                    attrs = {"scale": node.attrs["scale"]}
                    self.body.append(Node("attend", (q, k, v, visible), node.outputs, attrs))
                case "cast" if node.attrs["dtype"] == DType.FLOAT and not self._has_float():
                    operands = (*inputs, self.emit("dtype", (), "dtype"))
                    self.body.append(dataclasses.replace(node, inputs=operands))
                case "call" | "loop":
                    operands = inputs
                    for each in self.hoisted[node.attrs["function"]]:
                        given = [operands[place] for place in each.inputs]
                        name = opaque_kind(each.node.outputs[0])
                        operands += (self.emit(each.node.op, given, name, **each.node.attrs),)
                    self.body.append(dataclasses.replace(node, inputs=operands))
                case _:
                    self.body.append(dataclasses.replace(node, inputs=inputs))

    def _has_float(self) -> bool:
        """Whether an input or parameter shows what the run's dtype is."""
        return any(v.type.dtype is DType.FLOAT for v in self.function.inputs) or any(
            node.op == "parameter" for node in self.function.body
        )

    def _visible(self, positions: Value, context: Dim, window: int | None) -> Value:
        inputs = [positions]
        if context == CONTEXT:
            inputs.append(self.emit("end", (), "end"))
        return self.emit("visible", inputs, "visible", context=context, window=window)

    def _write(self, index: int, node: Node, inputs: tuple[Value, ...]) -> None:
        x, starts, lengths, *rows = inputs
        end = self.emit("end", (), "end")
        slots = self.emit("slots", (starts, lengths, end, *rows), "slots", size=x.type.shape[1])
        read = self._read_after(index, node)
        if read is None:
            self.body.append(Node("write", (x, slots), (), {"state": node.attrs["state"]}))
            return
        attrs = self._state(self.function.body.index(read), read)
        (result,) = read.outputs
        value = Value(self.count, result.type, result.name)
        self.count += 1
        self.map[result] = value
        self.body.append(Node("update", (x, slots), (value,), attrs))

    def _state(self, index: int, read: Node) -> dict[str, Any]:
        """A read is a view; it is copied if the function writes that state again."""
        state = read.attrs["state"]
        copied = any(
            later.op == "state_write" and later.attrs["state"] == state
            for later in self.function.body[index + 1 :]
        )
        return {"state": state, "copied": copied}

    def _read_after(self, index: int, node: Node) -> Node | None:
        """The next read of what was just written, if nothing writes that state in between."""
        state, rows = node.attrs["state"], node.inputs[3:]
        for later in self.function.body[index + 1 :]:
            if later.op in ("state_write", "state_read") and later.attrs["state"] == state:
                fits = later.op == "state_read" and later.inputs == rows
                return later if fits and later.outputs[0] not in self.map else None
        return None

    def finish(self, carried: int | None) -> tuple[Function, list[_Hoisted]]:
        """The function and what its callers are to compute; an entry keeps everything (None).

        The first ``carried`` inputs change from one turn of a loop to the next: what depends on
        them stays.
        """
        inputs, body, hoisted = list(self.function.inputs), [], []
        for node in self.body:
            if carried is not None and node.op in HOISTED:
                places = [inputs.index(v) if v in inputs else -1 for v in node.inputs]
                if all(place >= carried for place in places):
                    hoisted.append(_Hoisted(node, tuple(places)))
                    inputs.append(node.outputs[0])
                    continue
            body.append(node)
        outputs = tuple(self.map.get(value, value) for value in self.function.outputs)
        return Function(self.function.name, tuple(inputs), tuple(body), outputs), hoisted


def hoist(program: Program) -> Program:
    """Rewrite states and attention in our ops, computed as far out as they can be."""
    carried = _carried(program)
    hoisted: dict[str, list[_Hoisted]] = {}
    functions: dict[str, Function] = {}
    for name, function in program.functions.items():
        rewriter = _Rewriter(function, hoisted)
        rewriter.rebuild()
        functions[name], hoisted[name] = rewriter.finish(carried.get(name, 0))
    entries = {}
    for name, entry in program.entries.items():
        rewriter = _Rewriter(entry, hoisted)
        rewriter.rebuild()
        entries[name] = rewriter.finish(None)[0]
    return dataclasses.replace(program, functions=functions, entries=entries)


def _carried(program: Program) -> dict[str, int]:
    """For each looped function, how many of its inputs a turn hands to the next."""
    carried: dict[str, int] = {}
    for function in program.all_functions():
        for node in function.body:
            if node.op == "loop":
                name = node.attrs["function"]
                carried[name] = max(carried.get(name, 0), len(node.outputs))
    return carried


# --- dropping ---------------------------------------------------------------------------------


def drop_unused(program: Program) -> Program:
    """Drop inputs that a function does not use, and hoisted nodes that nothing uses."""
    carried = _carried(program)
    kept: dict[str, list[int]] = {}
    functions: dict[str, Function] = {}
    for name, function in program.functions.items():
        slim = _slim(function, kept)
        used = _used(slim.body, slim.outputs)
        kept[name] = [
            place
            for place, value in enumerate(slim.inputs)
            if value in used or place < carried.get(name, 0)
        ]
        inputs = tuple(slim.inputs[place] for place in kept[name])
        functions[name] = dataclasses.replace(slim, inputs=inputs)
    entries = {name: _slim(entry, kept) for name, entry in program.entries.items()}
    return dataclasses.replace(program, functions=functions, entries=entries)


def _used(body: Sequence[Node], outputs: Sequence[Value]) -> set[Value]:
    return {*outputs, *(value for node in body for value in node.inputs)}


def _slim(function: Function, kept: Mapping[str, Sequence[int]]) -> Function:
    body = []
    for node in function.body:
        if node.op in CALLS:
            inputs = tuple(node.inputs[place] for place in kept[node.attrs["function"]])
            node = dataclasses.replace(node, inputs=inputs)  # noqa: PLW2901
        body.append(node)
    needed = set(function.outputs)
    slim: list[Node] = []
    for node in reversed(body):
        if node.op in HOISTED and node.outputs[0] not in needed:
            continue
        needed.update(node.inputs)
        slim.append(node)
    return dataclasses.replace(function, body=tuple(reversed(slim)))


# --- order ------------------------------------------------------------------------------------


def sink(function: Function) -> Function:
    """Move changes of shape to just before their first use, where a person would write them."""
    body = list(function.body)
    for node in reversed(function.body):
        if node.op in ("reshape", "broadcast"):
            here = body.index(node)
            users = [i for i, other in enumerate(body) if node.outputs[0] in other.inputs]
            if users:
                body.insert(min(users) - 1, body.pop(here))
    return dataclasses.replace(function, body=tuple(body))
