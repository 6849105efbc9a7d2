"""One function for prompt and step: ``extend``, on caches whose rows are those of the batch.

Inputs ``tokens[B, S]``, ``starts[B]`` and ``lengths[B]``, and a cache of B rows for every state;
results are the likeliest ``token[B]`` and ``logits[B, V]`` of each row's last token. A step is a
prompt of one token, so one graph serves both and weights are there once.
"""

import dataclasses

from linnet.errors import UnavailableError
from linnet.spec.passes.inline import inline_entry
from linnet.spec.passes.join import join_linears
from linnet.spec.program import Function, Node, Program, Value
from linnet.spec.types import DType, TensorType

AFTER_HEAD = frozenset({"cast", "reshape", "broadcast", "mul", "div", "tanh"})
"""What may lie between the head's product and the logits."""


def step_program(program: Program, *others: str) -> Program:
    """The program with sibling products joined and ``step`` and ``others`` as its entries.

    Raises UnavailableError for what is not a decoder.
    """
    missing = [name for name in ("extend", "extend_greedy") if name not in program.entries]
    if missing:
        raise UnavailableError(
            f"the onnx plugin runs decoders with caches; this program has no entry {missing[0]!r}"
        )
    joined = join_linears(program)
    greedy, logits = joined.entries["extend_greedy"], joined.entries["extend"]
    both = dataclasses.replace(greedy, name="step", outputs=(*greedy.outputs, *logits.outputs))
    kept = {name: joined.entries[name] for name in others}
    return dataclasses.replace(joined, entries={"step": both, **kept})


def step_function(program: Program) -> Function:
    """The flat function of a ``step_program``, its cache rows those of the batch."""
    function = inline_entry(program, "step")
    rows = next(value for value in function.inputs if value.name == "rows")
    body = [
        dataclasses.replace(node, inputs=tuple(v for v in node.inputs if v is not rows))
        if node.op in ("state_read", "state_write")
        else node
        for node in function.body
    ]
    inputs = tuple(value for value in function.inputs if value is not rows)
    return dataclasses.replace(function, inputs=inputs, body=tuple(body))


def head_path(function: Function) -> str | None:
    """The parameter whose product the logits of a step are; None where they are not one."""
    made = {value: node for node in function.body for value in node.outputs}
    node = made[function.outputs[-1]]
    while node.op != "linear":
        if node.op not in AFTER_HEAD:
            return None
        # What scales or bounds logits has constants beside them.
        node = next(made[value] for value in node.inputs if made[value].op != "constant")
    weight = made[node.inputs[1]]
    return str(weight.attrs["path"]) if weight.op == "parameter" else None


def sample_function(program: Program) -> Function:
    """Choosing a token of ``logits``: what ``extend_sample`` does after its logits are there."""
    entry = program.entries["extend_sample"]
    node = next(n for n in reversed(entry.body) if n.op == "sample")
    names = ("logits", "positions", "seeds", "temperature", "top_k", "top_p", "min_p")
    types = [value.type for value in node.inputs]
    inputs = tuple(Value(i, t, n) for i, (t, n) in enumerate(zip(types, names, strict=True)))
    output = Value(len(inputs), TensorType(DType.I32, types[0].shape[:1]))
    body = (Node("sample", inputs, (output,), {}),)
    return Function("sample", inputs, body, (output,))
