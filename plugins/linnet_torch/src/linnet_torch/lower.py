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

from linnet.spec.passes.expand import expand
from linnet.spec.program import CONTEXT, Function, Node, Program, Value
from linnet.spec.types import Dim, DType, TensorType

HOISTED = ("end", "dtype", "slots", "visible")
CALLS = ("call", "loop")
STATE_OPS = ("update", "write", "read")

OPAQUE = TensorType(DType.BOOL, ())
"""The type of what is no tensor: a number of positions, slots, visible keys, a dtype."""


def lower(program: Program, claimed: Container[str]) -> Program:
    """The program to write as source, the composites outside ``claimed`` written out."""
    program = expand(share_entries(program), claimed)
    program = merge(drop_unused(hoist(program)))
    entries = {name: sink(mark_starts(entry)) for name, entry in program.entries.items()}
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
            value = Value(self.count, OPAQUE, name)
            self.count += 1
            self.body.append(Node(op, tuple(inputs), (value,), attrs))
            self.shared[key] = value
        return self.shared[key]

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
                    visible = self._visible(positions, k.type.shape[1], node.attrs["window"])
                    attrs = {"scale": node.attrs["scale"]}
                    self.body.append(Node("attend", (q, k, v, visible), node.outputs, attrs))
                case "cast" if node.attrs["dtype"] == DType.FLOAT and not self._has_float():
                    operands = (*inputs, self.emit("dtype", (), "dtype"))
                    self.body.append(dataclasses.replace(node, inputs=operands))
                case "call" | "loop":
                    operands = inputs
                    for each in self.hoisted[node.attrs["function"]]:
                        given = [operands[place] for place in each.inputs]
                        name = each.node.outputs[0].name
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


# --- merging ----------------------------------------------------------------------------------


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


# --- rows that are alike ----------------------------------------------------------------------


def mark_starts(entry: Function) -> Function:
    """Mark the nodes that may rely on ``start``: where every row starts, if it is the same place.

    A session gives it for rows that all start there and have all their tokens. It helps only where
    positions follow from the entry's own inputs in the way of ``linnet.spec.decoder``; this looks
    that up rather than believing it. ``start="0"`` marks positions that are 0, 1, 2, ... anyway.
    """
    made = {value: node for node in entry.body for value in node.outputs}
    inputs = {value.name: value for value in entry.inputs}
    starts = inputs.get("starts") or inputs.get("positions")

    def is_op(value: Value, op: str) -> bool:
        return value in made and made[value].op == op

    def is_number(value: Value, number: int) -> bool:
        return is_op(value, "constant") and tuple(made[value].attrs["values"]) == (number,)

    def is_column(value: Value) -> bool:
        """``starts`` as ``[B, 1]``."""
        return is_op(value, "reshape") and made[value].inputs[0] == starts

    def is_full(lengths: Value) -> bool:
        """Given as an input, or 1 where the position is not negative and else 0."""
        if lengths == inputs.get("lengths"):
            return True
        if not is_op(lengths, "where"):
            return False
        condition, one, zero = made[lengths].inputs
        if not (is_op(condition, "le") and is_number(one, 1) and is_number(zero, 0)):
            return False
        low, position = made[condition].inputs
        return is_number(low, 0) and position == starts

    def start_of(node: Node) -> str | None:
        first = node.inputs[0]
        if node.op == "slots":
            return "start" if first == starts and is_full(node.inputs[1]) else None
        if len(node.inputs) == 1:
            while is_op(first, "broadcast") or is_op(first, "reshape"):
                first = made[first].inputs[0]
            plain = is_op(first, "iota") and made[first].attrs["size"] == node.attrs["context"]
            return "0" if plain else None
        if is_column(first) and first.type.shape[1] == 1:
            return "start"
        if is_op(first, "add"):
            column, step = made[first].inputs
            if is_column(column) and is_op(step, "iota"):
                return "start" if made[step].attrs["size"] == first.type.shape[1] else None
        return None

    body = tuple(
        dataclasses.replace(node, attrs={**node.attrs, "start": start_of(node)})
        if node.op in ("slots", "visible")
        else node
        for node in entry.body
    )
    return dataclasses.replace(entry, body=body)


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
