"""Rolling: a run of calls to one function at consecutive places becomes a loop."""

from linnet.spec.program import Node, Value


def roll(body: tuple[Node, ...], outputs: tuple[Value, ...]) -> tuple[Node, ...]:
    """Replace ``x = f(x, c)`` at ``layers.0``, ``layers.1``, ... by one ``loop`` node.

    A run qualifies when each call's outputs are exactly the next call's first inputs, the other
    inputs stay the same, and nothing else reads what passes between two calls.
    """
    uses: dict[Value, int] = {}
    for node in body:
        for value in node.inputs:
            uses[value] = uses.get(value, 0) + 1
    for value in outputs:
        uses[value] = uses.get(value, 0) + 1

    result: list[Node] = []
    index = 0
    while index < len(body):
        run = [body[index]]
        while index + len(run) < len(body) and _follows(run[-1], body[index + len(run)], uses):
            run.append(body[index + len(run)])
        result.append(_loop(run) if len(run) > 1 else run[0])
        index += len(run)
    return tuple(result)


def _split(at: str) -> tuple[str, int] | None:
    parent, _, last = at.rpartition(".")
    return (parent, int(last)) if parent and last.isdecimal() else None


def _follows(first: Node, second: Node, uses: dict[Value, int]) -> bool:
    if first.op != "call" or second.op != "call":
        return False
    one, two = _split(first.attrs["at"]), _split(second.attrs["at"])
    carried = len(first.outputs)
    return (
        first.attrs["function"] == second.attrs["function"]
        and one is not None
        and two is not None
        and (one[0], one[1] + 1) == two
        and carried > 0
        and second.inputs[:carried] == first.outputs
        and second.inputs[carried:] == first.inputs[carried:]
        and all(uses[value] == 1 for value in first.outputs)
    )


def _loop(run: list[Node]) -> Node:
    first, last = run[0], run[-1]
    place = _split(first.attrs["at"])
    assert place is not None  # _follows checked it
    attrs = {
        "function": first.attrs["function"],
        "at": place[0],
        "start": place[1],
        "stop": place[1] + len(run),
    }
    return Node("loop", first.inputs, last.outputs, attrs, first.where)
