"""Looking up in an entry's own arithmetic which nodes may rely on rows being alike."""

import dataclasses

from linnet.spec.program import Function, Node, Value


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
