"""Decoders: the entries of every causal language model, made from one ``__call__``.

``forward(tokens[B, S]) -> logits[B, S, V]`` has no cache. ``extend(tokens[B, S], rows[B],
starts[B], lengths[B]) -> logits[B, V]`` writes the first ``lengths[b]`` tokens of row ``b`` to
cache row ``rows[b]`` from position ``starts[b]`` on, and gives the logits of the last of them.
``decode(tokens[R], positions[R]) -> logits[R, V]`` adds one token to every cache row; a negative
position marks a row as idle: nothing is written, and its logits mean nothing.

``extend_greedy`` and ``decode_greedy`` choose the token themselves; ``extend_sample`` and
``decode_sample`` take ``seeds``, ``temperature``, ``top_k``, ``top_p`` and ``min_p`` as well, one
for each row. Logits are f32, tokens i32, all inputs i32 but the three f32 options.
"""

from collections.abc import Callable, Sequence

from linnet.spec import composites as ops
from linnet.spec.blocks import Block, Param, Span, State, walk
from linnet.spec.check import check
from linnet.spec.program import Function, Parameter, Program
from linnet.spec.program import State as StateSpec
from linnet.spec.trace import Builder, Tensor, Tracer, apply, building
from linnet.spec.types import Dim, DType, TensorType


class Decoder(Block):
    """A causal language model: a subclass says how hidden states and logits are computed."""

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        """i32 ``tokens[B, S]`` to hidden states ``[B, S, D]``."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[..., D]`` to logits ``[..., V]``."""
        raise NotImplementedError


def trace_decoder(family: str, model: Decoder) -> Program:
    """The checked program of a decoder, with all seven entries."""
    tree = list(walk(model))
    paths = {id(thing): path for path, thing in tree}
    tracer = Tracer(paths)

    def entry(
        name: str, inputs: dict[str, tuple[Dim, ...]], body: Callable[..., Tensor]
    ) -> Function:
        tracer.entry = name
        builder = Builder(tracer, type(model).__name__, "")
        with building(builder):
            tensors = [
                builder.input(TensorType(DType.I32, shape), hint) for hint, shape in inputs.items()
            ]
            return builder.finish(name, [ops.cast(body(*tensors), DType.F32)])

    def forward(tokens: Tensor) -> Tensor:
        positions = ops.broadcast(ops.iota(tokens.shape[1]), *tokens.shape)
        return model.logits(model.hidden(tokens, Span(positions)))

    def extend(tokens: Tensor, rows: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        batch, length = tokens.shape
        positions = ops.reshape(starts, batch, 1) + ops.iota(length)
        hidden = model.hidden(tokens, Span(positions, starts, lengths, rows))
        return model.logits(ops.gather(hidden, lengths - 1, axis=1))

    def decode(tokens: Tensor, positions: Tensor) -> Tensor:
        rows = tokens.shape[0]
        active = apply("le", 0, positions)
        lengths = ops.where(active, ops.scalar(1, DType.I32), ops.scalar(0, DType.I32))
        span = Span(ops.reshape(positions, rows, 1), positions, lengths)
        hidden = model.hidden(ops.reshape(tokens, rows, 1), span)
        return model.logits(ops.reshape(hidden, rows, hidden.shape[-1]))

    entries = {
        "forward": entry("forward", {"tokens": ("B", "S")}, forward),
        "extend": entry(
            "extend",
            {"tokens": ("B", "S"), "rows": ("B",), "starts": ("B",), "lengths": ("B",)},
            extend,
        ),
        "decode": entry("decode", {"tokens": ("R",), "positions": ("R",)}, decode),
    }
    for step in ("extend", "decode"):
        entries[f"{step}_greedy"] = _choosing(f"{step}_greedy", entries[step], greedy=True)
        entries[f"{step}_sample"] = _choosing(f"{step}_sample", entries[step], greedy=False)

    program = Program(
        family=family,
        parameters=tuple(
            Parameter(path, p.shape, p.role, paths[id(p.tied_to)] if p.tied_to else None)
            for path, p in tree
            if isinstance(p, Param)
        ),
        states=tuple(
            StateSpec(path, TensorType(DType.FLOAT, s.full_shape))
            for path, s in tree
            if isinstance(s, State)
        ),
        functions=tracer.functions,
        entries=entries,
    )
    check(program)
    return program


_OPTIONS: Sequence[tuple[str, DType]] = (
    ("seeds", DType.I32),
    ("temperature", DType.F32),
    ("top_k", DType.I32),
    ("top_p", DType.F32),
    ("min_p", DType.F32),
)


def _choosing(name: str, step: Function, *, greedy: bool) -> Function:
    """A step that goes on to choose the next token of every row."""
    builder = Builder(None, name, "")
    builder.inputs = list(step.inputs)
    builder.nodes = list(step.body)
    builder.count = step.next_index
    inputs = {value.name: Tensor(value, builder) for value in step.inputs}
    with building(builder):
        logits = Tensor(step.outputs[0], builder)
        if greedy:
            return builder.finish(name, [ops.greedy(logits)])
        batch = logits.shape[0]
        options = [builder.input(TensorType(dtype, (batch,)), hint) for hint, dtype in _OPTIONS]
        following = (
            inputs["positions"] + 1
            if "positions" in inputs
            else inputs["starts"] + inputs["lengths"]
        )
        return builder.finish(name, [ops.sample(logits, following, *options)])
