"""Rewriting a flat step for ONNX Runtime's own operators.

What a rewrite finds is replaced by nodes of three ops that only this plugin's writer knows:

- ``cached_attention``: rotary positions, writing the caches and attention over them. Inputs are
  queries, keys and values, or one tensor with all three, then starts and lengths.
- ``skip_rms_norm``: a sum and its norm, giving the norm and the sum.
- ``split``: all the slices of a tensor along its last axis.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from linnet.spec.program import Function, Node, Value
from linnet_onnx.support import Rotary, attention_refusal


class Fuser:
    """Rewrites one function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.body = list(function.body)
        self._index()

    def _index(self) -> None:
        self.made = {value: node for node in self.body for value in node.outputs}
        self.uses: dict[Value, list[Node]] = {}
        for node in self.body:
            for value in node.inputs:
                self.uses.setdefault(value, []).append(node)

    def maker(self, value: Value, op: str) -> Node | None:
        """The node of this op that makes a value."""
        node = self.made.get(value)
        return node if node is not None and node.op == op else None

    def replace(self, old: Sequence[Node], new: Node) -> None:
        """Put a node in the place of the last of ``old``, and take the others away."""
        gone = {id(node) for node in old}
        last = max(i for i, node in enumerate(self.body) if id(node) in gone)
        self.body[last] = new
        self.body = [node for node in self.body if id(node) not in gone]
        self._index()

    def finish(self) -> Function:
        """The function without what nothing reads any more."""
        needed = set(self.function.outputs)
        kept: list[Node] = []
        for node in reversed(self.body):
            writes = node.op in ("state_write", "cached_attention")
            if writes or any(value in needed for value in node.outputs):
                kept.append(node)
                needed.update(node.inputs)
        return dataclasses.replace(self.function, body=tuple(reversed(kept)))


def fuse(function: Function, dtype: str) -> tuple[Function, tuple[str, ...]]:
    """The function rewritten, and why each attention that stays as it is does."""
    fuser = Fuser(function)
    # Parameters first: a fused node may stand before the place where one was read.
    fuser.body.sort(key=lambda node: node.op != "parameter")
    refused = []
    for node in [n for n in fuser.body if n.op == "attention"]:
        reason = _attention(fuser, node, dtype)
        if reason is not None:
            refused.append(reason)
    for node in [n for n in fuser.body if n.op == "rms_norm"]:
        _skip_norm(fuser, node)
    fuser.body = list(fuser.finish().body)
    fuser._index()
    for value in list(fuser.uses):
        _split(fuser, value)
    return fuser.finish(), tuple(dict.fromkeys(refused))


def _attention(fuser: Fuser, node: Node, dtype: str) -> str | None:
    """Fuse one attention with its caches; the reason where that cannot be."""
    q, k, v, positions = node.inputs
    reads = [fuser.maker(value, "state_read") for value in (k, v)]
    if any(read is None or read.inputs for read in reads):
        return "attention that reads no cache"
    paths = [read.attrs["state"] for read in reads if read is not None]
    writes = [
        next((n for n in fuser.body if n.op == "state_write" and n.attrs["state"] == path), None)
        for path in paths
    ]
    if writes[0] is None or writes[1] is None:
        return "attention over caches that it does not write"
    new_k, starts, lengths = writes[0].inputs
    new_v = writes[1].inputs[0]
    rotary = None
    ropes = [fuser.maker(value, "rope") for value in (q, new_k)]
    if ropes[0] is not None and ropes[1] is not None:
        rotary = _rotary(fuser, ropes[0], ropes[1], positions)
    heads, size = q.type.shape[2:]
    kv_heads = new_k.type.shape[2]
    window = node.attrs.get("window")
    refusal = attention_refusal(dtype, size, new_v.type.shape[3], window)
    if refusal is not None:
        return refusal
    if rotary is not None and rotary.fits(size) and ropes[0] is not None and ropes[1] is not None:
        q, new_k = ropes[0].inputs[0], ropes[1].inputs[0]
    else:
        rotary = None
    attrs: dict[str, Any] = {
        "keys": paths[0],
        "values": paths[1],
        "scale": node.attrs["scale"],
        "window": window,
        "heads": heads,
        "kv_heads": kv_heads,
        "rotary": rotary,
    }
    packed = _packed(fuser, (q, new_k, new_v))
    inputs = (packed,) if packed is not None else (q, new_k, new_v)
    fused = Node("cached_attention", (*inputs, starts, lengths), node.outputs, attrs, node.where)
    reads_writes = [n for n in (*reads, *writes) if n is not None]
    fuser.replace([*reads_writes, node], fused)
    return None


def _rotary(fuser: Fuser, q: Node, k: Node, positions: Value) -> Rotary | None:
    """The table that both read, if it is of these positions."""
    table = fuser.maker(q.inputs[1], "rope_table")
    if table is None or q.inputs[1:] != k.inputs[1:] or table.inputs[0] != positions:
        return None
    return Rotary(tuple(table.attrs["frequencies"]), table.attrs.get("scale", 1.0))


def _packed(fuser: Fuser, parts: Sequence[Value]) -> Value | None:
    """The product that queries, keys and values are slices of, one after the other."""
    source, at = None, 0
    for part in parts:
        shaped = fuser.maker(part, "reshape")
        cut = fuser.maker(shaped.inputs[0], "slice") if shaped is not None else None
        if cut is None or cut.attrs["start"] != at or source not in (None, cut.inputs[0]):
            return None
        source, at = cut.inputs[0], cut.attrs["stop"]
    return source if source is not None and source.type.shape[-1] == at else None


def _skip_norm(fuser: Fuser, norm: Node) -> None:
    add = fuser.maker(norm.inputs[0], "add")
    if add is None or add.inputs[0].type != add.inputs[1].type or add.outputs[0].type.rank != 3:
        return
    inputs = (*add.inputs, norm.inputs[1])
    new = Node("skip_rms_norm", inputs, (*norm.outputs, *add.outputs), norm.attrs, norm.where)
    # In the place of the sum: what reads it comes after.
    place = next(i for i, node in enumerate(fuser.body) if node is add)
    fuser.body[place] = new
    fuser.body = [node for node in fuser.body if node is not norm]
    fuser._index()


def _split(fuser: Fuser, value: Value) -> None:
    slices = [n for n in fuser.uses.get(value, []) if n.op == "slice"]
    slices.sort(key=lambda n: int(n.attrs["start"]))
    last = value.type.rank - 1
    ends = [0, *(n.attrs["stop"] for n in slices)]
    whole = (
        len(slices) > 1
        and all(n.attrs["axis"] in (-1, last) for n in slices)
        and all(n.attrs["start"] == end for n, end in zip(slices, ends, strict=False))
        and ends[-1] == value.type.shape[-1]
    )
    if not whole:
        return
    outputs = tuple(n.outputs[0] for n in slices)
    first = min(i for i, node in enumerate(fuser.body) if any(node is n for n in slices))
    gone = {id(n) for n in slices}
    new = Node("split", (value,), outputs, {}, slices[0].where)
    fuser.body[first] = new
    fuser.body = [node for node in fuser.body if id(node) not in gone]
    fuser._index()
