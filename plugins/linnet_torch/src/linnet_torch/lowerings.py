"""Ways of writing a program for one use of it: which helpers and rules differ from the usual ones.

Which one is taken depends on the device and on the number of rows, as measured; see
``linnet_torch.compiled``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from linnet.spec.program import Node
from linnet_torch.ops import Context, Expr, Rule, call


def _linear(c: Context, node: Node, operands: list[Expr]) -> Expr:
    """One vector for each row goes to the operator for few rows, all else to PyTorch's."""
    few = all(size == 1 for size in node.inputs[0].type.shape[1:-1])
    name = "torch.ops.linnet.linear" if few else c.helper("linear")
    return call(name, *(operand.text for operand in operands))


@dataclass(frozen=True)
class Lowering:
    """``helpers`` names the module whose definitions replace those of ``helpers.py``."""

    helpers: str = ""
    starts: bool = True
    """Whether entries take ``start``, and leave masks out where it is given."""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    needs: str = "nothing but torch"
    """What the file needs, for its header."""


PLAIN = Lowering()
"""PyTorch's own functions: for eager execution, and for prompts and many rows everywhere."""

CPU_PROMPT = Lowering(rules={"linear": _linear}, needs="torch and Linnet's operators")
"""A prompt of one row on a CPU: the head sees its last token alone."""

CPU_STEP = Lowering("step_helpers", False, {"linear": _linear}, "torch and Linnet's operators")
"""A token for each of a few rows on a CPU."""

CPU_STEP_MANY = Lowering("step_helpers", False, needs="torch and Linnet's operators")
"""A token for each of many rows on a CPU: products are those of matrices."""
