"""Writing one function: which values get a name, what they are called, and the lines.

A value that is used once becomes part of the expression that uses it, as long as that reads well;
the others are assigned. Names come from the program's hints, from parameters and states, and are
used again once their value is, as a person would write ``x = x + ...``.
"""

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from linnet.errors import UnavailableError
from linnet.spec.layout import WIDTH, wrap
from linnet.spec.ops import CALLS
from linnet.spec.paths import attribute
from linnet.spec.program import Function, Node, Value
from linnet.spec.types import Dim, DType
from linnet_torch.lower import HOISTED, OPAQUE, STATE_OPS
from linnet_torch.naming import Naming
from linnet_torch.ops import TORCH_DTYPES, Expr, Rule, as_tensor, write_op

LEAVES = ("parameter", "end", "dtype")
CHAINED = ("reshape", "broadcast", "transpose", "cast", "slice")
HEAVY = (
    *("linear", "embedding", "rms_norm", "layer_norm", "matmul", "attend", "rope_table", "sample"),
    *("gumbel", "softmax", "sort", "cumsum", "reduce_sum", "reduce_max", "gather"),
)
EFFECTS = (*CALLS, *STATE_OPS, "slots", "visible", "entry")
"""Always a statement of their own, but for a call whose result is added at once or returned."""

DEPTH = 3
"""How many operations may be nested in one expression."""


@dataclass(frozen=True)
class Needs:
    """What a function takes besides its tensors."""

    weights: bool
    state: bool


@dataclass
class Requests:
    """What the functions of a file ask the file for."""

    helpers: set[str] = field(default_factory=set)
    constants: dict[tuple[float, ...], str] = field(default_factory=dict)


def place(root: str, path: str) -> str:
    """``w.layers[0].norm.weight``."""
    text = root
    for name in attribute(path).split("."):
        text += f"[{name}]" if name.isdecimal() else f".{name}"
    return text


class Writer:
    """Writes the body of one function; ``lines`` and ``uses`` are its results."""

    def __init__(
        self,
        function: Function,
        needs: Mapping[str, Needs],
        entries: Mapping[str, Sequence[str]],
        requests: Requests,
        reserved: frozenset[str],
        dtype: str | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        self.function = function
        self.needs = needs
        self.entries = entries
        self.requests = requests
        self.reserved = reserved
        self.run_dtype = dtype
        self.rules = rules or {}
        self.made = {value: (i, n) for i, n in enumerate(function.body) for value in n.outputs}
        self.users: dict[Value, list[int]] = {}
        for index, node in enumerate(function.body):
            for value in node.inputs:
                self.users.setdefault(value, []).append(index)
        for value in function.outputs:
            self.users.setdefault(value, []).append(len(function.body))
        self.hints = Naming(function, self.made, self.users).hints
        self.named: set[int] = set()  # nodes that were made statements to shorten another
        self.borrowed: set[Value] = set()  # inputs that only lend their device or dtype
        self.names: dict[Value, str] = {}
        self.dims_used: dict[str, None] = {}

    # --- which values get a name ---------------------------------------------------------------

    def inline(self, index: int) -> bool:
        """Whether a node is written inside the statement that uses it."""
        node = self.function.body[index]
        if node.op in LEAVES or (node.op == "constant" and node.attrs["shape"] == ()):
            return True
        if len(node.outputs) != 1 or index in self.named:
            return False
        users = self.users.get(node.outputs[0], [])
        if len(users) != 1:
            return False
        (user,) = users
        if user == len(self.function.body):
            return len(self.function.outputs) == 1 and self._nothing_between(index, user)
        op = self.function.body[user].op
        if node.op in EFFECTS:
            wanted = op == "add" and node.op == "call"
            return wanted and self._nothing_between(index, user)
        if op == "loop" or (op in CALLS and node.op != "reshape"):
            return False
        if self._is_heavy(index):
            return op in CHAINED or (node.op == "softmax" and op == "matmul")
        return True

    def _is_heavy(self, index: int) -> bool:
        """Worth a line; what is chained to it is, too."""
        node = self.function.body[index]
        if node.op in CHAINED and node.inputs and node.inputs[0] in self.made:
            first = self.made[node.inputs[0]][0]
            return self.inline(first) and self._is_heavy(first)
        return node.op in HEAVY

    def _nothing_between(self, index: int, user: int) -> bool:
        """Whether everything between two nodes is written inside the second's statement."""
        return all(self.inline(between) for between in range(index + 1, user))

    # --- what they are called ------------------------------------------------------------------

    def _name(self, value: Value, statement: int) -> str:
        """The hint, or the hint with a number while another value of that name is needed."""
        hint = self.hints[value]
        taken = {
            name
            for other, name in self.names.items()
            if self._last_use(other) > statement or other in self.borrowed
        }
        number, name = 1, hint
        while name in taken or name in self.reserved or keyword.iskeyword(name):
            number += 1
            name = f"{hint}{number}"
        return name

    def _last_use(self, value: Value) -> int:
        """The last statement that shows a value, through what is written inside it."""
        last = -1
        for user in self.users.get(value, ()):
            if user < len(self.function.body) and self.inline(user):
                last = max(last, self._last_use(self.function.body[user].outputs[0]))
            else:
                last = max(last, user)
        return last

    # --- what the table of ops asks for --------------------------------------------------------

    def dims(self, shape: Sequence[Dim]) -> str:
        """Sizes as text; the names among them will be bound at the top."""
        for dim in shape:
            if isinstance(dim, str):
                self.dims_used[dim] = None
        return ", ".join(map(str, shape))

    def device(self) -> str:
        """The device of the first input, or of a parameter."""
        for value in self.function.inputs:
            if value.type != OPAQUE:
                self.borrowed.add(value)
                return f"{value.name}.device"
        return f"{self._some_parameter()}.device"

    def dtype(self, dtype: DType) -> str:
        """A torch dtype; the run's own is that of an input or a parameter."""
        if dtype is not DType.FLOAT:
            if dtype not in TORCH_DTYPES:
                raise UnavailableError(f"PyTorch does not compute in {dtype}")
            return TORCH_DTYPES[dtype]
        for value in self.function.inputs:
            if value.type.dtype is DType.FLOAT:
                self.borrowed.add(value)
                return f"{value.name}.dtype"
        return f"{self._some_parameter()}.dtype"

    def _some_parameter(self) -> str:
        for node in self.function.body:
            if node.op == "parameter":
                return place("w", node.attrs["path"])
        raise UnavailableError(f"{self.function.name} has no tensor to take a dtype or device off")

    def helper(self, name: str) -> str:
        """Have a helper in the file."""
        self.requests.helpers.add(name)
        return name

    def literal(self, node: Node) -> str:
        """Have a constant in the file."""
        values = tuple(node.attrs["frequencies" if node.op == "rope_table" else "values"])
        kind = "FREQUENCIES" if node.op == "rope_table" else "VALUES"
        if values not in self.requests.constants:
            count = sum(kind in name for name in self.requests.constants.values())
            self.requests.constants[values] = kind if not count else f"{kind}_{count + 1}"
        return self.requests.constants[values]

    # --- expressions ---------------------------------------------------------------------------

    def expression(self, value: Value) -> Expr:
        """A name, or what is written in its place."""
        if value in self.names:
            return Expr(self.names[value])
        return self.node_expression(self.made[value][1])

    def node_expression(self, node: Node) -> Expr:
        """One node with everything that is written inside it."""
        match node.op:
            case "parameter":
                return Expr(place("w", node.attrs["path"]))
            case "end":
                return Expr("end")
            case "dtype":
                return Expr(self.run_dtype or "dtype")
        operands = [self.expression(value) for value in node.inputs]
        match node.op:
            case "call":
                return self._call(node, operands, node.attrs["at"])
            case "loop":
                return self._call(node, operands, f"{node.attrs['at']}.i")
            case "entry":
                name = node.attrs["entry"]
                extra = [f"{each}={each}" for each in self.entries[name]]
                roots = self._roots(self.needs[name], "")
                texts = (*roots, *(operand.text for operand in operands), *extra)
                return Expr(f"{name}({', '.join(texts)})")
            case "update":
                state = place("state", node.attrs["state"])
                text = f"{self.helper('update')}({state}, {operands[0].text}, {operands[1].text})"
                return Expr(f"{text}.clone()" if node.attrs["copied"] else text)
            case "write":
                state = place("state", node.attrs["state"])
                return Expr(
                    f"{self.helper('write')}({state}, {operands[0].text}, {operands[1].text})"
                )
            case "read":
                rows = operands[1].text if len(operands) > 1 else ":"
                text = f"{place('state', node.attrs['state'])}[{rows}, :{operands[0].text}]"
                return Expr(f"{text}.clone()" if node.attrs["copied"] else text)
        return write_op(self, node, operands, self.rules)

    def _roots(self, needs: Needs, at: str) -> list[str]:
        roots = ["w"] * needs.weights + ["state"] * needs.state
        if at.endswith(".i"):  # the turn of a loop
            return [f"{place(root, at[:-2])}[i]" for root in roots]
        return [place(root, at) if at else root for root in roots]

    def _call(self, node: Node, operands: Sequence[Expr], at: str) -> Expr:
        name = node.attrs["function"]
        tensors = [
            as_tensor(self, value, operand) if operand.number else operand.text
            for value, operand in zip(node.inputs, operands, strict=True)
        ]
        return Expr(f"{name}({', '.join([*self._roots(self.needs[name], at), *tensors])})")

    def _depth(self, index: int) -> int:
        """How many operations are nested in a node's expression."""
        node = self.function.body[index]
        inner = [
            self._depth(self.made[value][0])
            for value in node.inputs
            if value in self.made and self.inline(self.made[value][0])
        ]
        own = 0 if node.op in (*LEAVES, "constant", *CHAINED) else 1
        return own + max(inner, default=0)

    # --- statements ----------------------------------------------------------------------------

    def write(self) -> list[str]:
        """The body, a line each, indented by four."""
        while True:
            borrowed = set(self.borrowed)
            lines, too_long = self._attempt()
            if too_long is not None:
                self.named.add(too_long)
            elif borrowed == self.borrowed:  # else a name that is still needed was given away
                return lines

    def _attempt(self) -> tuple[list[str], int | None]:
        """All lines, or an inlined node that should have a name of its own."""
        self.names = {value: value.name for value in self.function.inputs}
        self.dims_used = {}
        lines: list[str] = []
        bound = {dim for value in self.function.inputs for dim in value.type.shape}
        shapes: list[tuple[int, str, str]] = []  # where a size may be read off, if it is needed
        last_shape = ""
        for index, node in enumerate(self.function.body):
            if self.inline(index):
                continue
            expression = self.node_expression(node).text
            if self._depth(index) > DEPTH:
                return [], self._too_deep(index)
            targets = [self._name(value, index) for value in node.outputs]
            self.names.update(zip(node.outputs, targets, strict=True))
            line = f"    {', '.join(targets)} = {expression}" if targets else f"    {expression}"
            if node.op == "loop":
                start = node.attrs["start"]
                turns = f"{start}, {node.attrs['stop']}" if start else f"{node.attrs['stop']}"
                lines.append(f"    for i in range({turns}):")
                line = "    " + line
            if len(line) > WIDTH and (inner := self._largest(index)) is not None:
                return [], inner
            shape = self._comment(node)
            told = shape == last_shape or shape[1:-1] in expression
            comment = f"  # {shape}" if shape and not told else ""
            last_shape = shape or last_shape
            fits = len(line) + len(comment) <= WIDTH and node.op != "loop"
            lines.extend([line + comment] if fits else wrap(line))
            for value, target in zip(node.outputs, targets, strict=True):
                for axis, dim in enumerate(value.type.shape):
                    if isinstance(dim, str) and dim not in bound:
                        bound.add(dim)
                        shapes.append((len(lines), dim, f"    {dim} = {target}.shape[{axis}]"))
        results = [self.expression(value) for value in self.function.outputs]
        texts = [
            as_tensor(self, value, result) if result.number else result.text
            for value, result in zip(self.function.outputs, results, strict=True)
        ]
        line = f"    return {', '.join(texts)}"
        if len(self.function.outputs) == 1 and self.function.outputs[0] in self.made:
            index = self.made[self.function.outputs[0]][0]
            if self.inline(index):
                if self._depth(index) > DEPTH:
                    return [], self._too_deep(index)
                if len(line) > WIDTH and (inner := self._largest(index)) is not None:
                    return [], inner
        lines.extend(wrap(line))
        for at, dim, line in reversed(shapes):
            if dim in self.dims_used:
                lines.insert(at, line)
        return [*self._bind_sizes(), *lines], None

    def _inside(self, index: int) -> list[int]:
        """The nodes that are written inside a node's expression as its operands."""
        values = self.function.body[index].inputs
        places = [self.made[value][0] for value in values if value in self.made]
        return [i for i in places if self.inline(i) and self.function.body[i].op not in LEAVES]

    def _too_deep(self, index: int) -> int:
        """Down the deepest operands of a node, the first that is not too deep itself."""
        while self._depth(index) > DEPTH or self.function.body[index].op in CHAINED:
            index = max(self._inside(index), key=self._depth)
        return index

    def _largest(self, index: int) -> int | None:
        """Of what is written inside a node, the part to name instead: the longest operand."""
        inside = [i for i in self._inside(index) if self.function.body[i].op != "constant"]
        if not inside:
            return None
        longest = max(inside, key=lambda i: len(self.node_expression(self.function.body[i]).text))
        if self.function.body[index].op in CHAINED:
            # What is chained to an operation stays with it, if there is anything else to name.
            deeper = self._largest(longest)
            return longest if deeper is None else deeper
        return longest

    def _comment(self, node: Node) -> str:
        """The shape of a result, where it is a tensor."""
        if len(node.outputs) != 1 or node.outputs[0].type == OPAQUE or node.op in HOISTED:
            return ""
        return shape_text(node.outputs[0])

    def _bind_sizes(self) -> list[str]:
        """``B, S, _ = x.shape`` for the sizes that the body names."""
        needed = dict(self.dims_used)
        lines = []
        for value in self.function.inputs:
            shape = value.type.shape
            found = [dim for dim in shape if dim in needed]
            if not found:
                continue
            for dim in found:
                needed.pop(str(dim), None)
            if len(found) == 1:
                lines.append(f"    {found[0]} = {value.name}.shape[{shape.index(found[0])}]")
            else:
                targets = [str(dim) if dim in found else "_" for dim in shape]
                lines.append(f"    {', '.join(targets)} = {value.name}.shape")
        return lines


def shape_text(value: Value) -> str:
    """``[B, S, 48]``; T as far as a call reads is ``end``."""
    return f"[{', '.join('end' if dim == 'T' else str(dim) for dim in value.type.shape)}]"
