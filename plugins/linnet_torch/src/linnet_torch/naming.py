"""What values are called: after the program's hints, after parameters and states, after uses."""

from collections.abc import Mapping, Sequence

from linnet.spec.paths import attribute
from linnet.spec.program import Function, Node, Value
from linnet.spec.types import DType
from linnet_torch.lower import STATE_OPS

NAMES = {
    "embedding": "x",
    "rms_norm": "h",
    "layer_norm": "h",
    "call": "x",
    "swiglu": "h",
    "attend": "y",
    "matmul": "y",
    "iota": "positions",
    "entry": "logits",
    "reduce_sum": "total",
    "reduce_max": "peak",
    "softmax": "p",
    "constant": "values",
    "concat": "joined",
    "eq": "mask",
    "lt": "mask",
    "le": "mask",
    "and": "mask",
    "xor": "bits",
    "shift_right": "bits",
    "argmax": "tokens",
    "greedy": "tokens",
    "sample": "tokens",
    "sort": "ranked",
}
"""What a result is called when nothing else says so; other ops pass on their input's name."""

OPERANDS = {
    "slots": ("starts", "lengths", "end", "rows"),
    "visible": ("positions", "end"),
    "attend": ("q", "k", "v", "visible"),
}
"""What an op's operands are called, if they have no better name."""


class Naming:
    """``hints``: for each value of a function, the name that it would best have.

    ``made`` is the place and node that a value comes from, ``users`` the places it is used at.
    """

    def __init__(
        self,
        function: Function,
        made: Mapping[Value, tuple[int, Node]],
        users: Mapping[Value, Sequence[int]],
    ) -> None:
        self.function = function
        self.made = made
        self.users = users
        self.hints = {value: value.name for value in function.inputs}
        for node in function.body:
            for value in node.outputs:
                self.hints[value] = value.name or self._hint(node, value)

    def _hint(self, node: Node, value: Value) -> str:
        if node.op in STATE_OPS:
            return str(node.attrs["state"].rpartition(".")[2])
        if node.op == "rope_table":
            return "cos" if value == node.outputs[0] else "sin"
        if node.op == "loop":
            return self.hints[node.inputs[node.outputs.index(value)]]
        if node.op == "linear":
            parameter = self.made.get(node.inputs[1])
            path = parameter[1].attrs.get("path", "") if parameter else ""
            name = attribute(path).split(".")[-2] if path.count(".") else "y"
            return "logits" if "head" in name else str(name.removesuffix("_proj"))
        if node.op == "add" and value.type.dtype is DType.I32:
            return self._called_as(value) or "positions"
        if node.op in NAMES:
            return self._called_as(value) or NAMES[node.op]
        for operand in node.inputs:
            if self._carries(operand, value):
                return self._called_as(value) or self.hints[operand]
        return self._called_as(value) or ("x" if node.op == "gather" else "y")

    def _carries(self, operand: Value, value: Value) -> bool:
        """Whether a result may go by the name of this operand: both are the same kind of thing."""
        node = self.made[operand][1] if operand in self.made else None
        if node and (node.op == "parameter" or (node.op == "constant" and not node.attrs["shape"])):
            return False
        kinds = [(v.type.dtype.is_float, v.type.dtype is DType.BOOL) for v in (operand, value)]
        return kinds[0] == kinds[1]

    def _called_as(self, value: Value) -> str:
        """What the first op that uses a value calls it."""
        for user in self.users.get(value, ()):
            node = self.function.body[user] if user < len(self.function.body) else None
            if node and node.op in OPERANDS:
                return OPERANDS[node.op][node.inputs.index(value)]
        return ""
