"""Passes keep the meaning: their structure here, and their numbers against the reference."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linnet.models.llama import Llama
from linnet.reference.interpreter import Interpreter
from linnet.spec import (
    Block,
    Decoder,
    DType,
    Embedding,
    Function,
    KVCache,
    Linear,
    Node,
    Param,
    Program,
    RMSNorm,
    Span,
    Tensor,
    TensorType,
    Value,
    from_json,
    to_json,
    trace,
    trace_decoder,
)
from linnet.spec import composites as ops
from linnet.spec.blocks import read
from linnet.spec.check import check
from linnet.spec.composites import COMPOSITES
from linnet.spec.ops import PRIMITIVES
from linnet.spec.passes.expand import expand, expand_function
from linnet.spec.passes.inline import inline_entry
from linnet.spec.passes.join import join_linears
from linnet.spec.passes.roll import roll
from linnet.testing.fixtures import f0_config, random_values

# --- roll -------------------------------------------------------------------------------------

X, C = (Value(index, TensorType(DType.FLOAT, ("B", 3))) for index in (0, 1))


def value(index: int) -> Value:
    return Value(index, X.type)


def call(at: str, x: Value, result: int, *, function: str = "layer", more: Any = (C,)) -> Node:
    attrs = {"function": function, "at": at}
    return Node("call", (x, *more), (value(result),), attrs, f"toy.py:{result}")


def chain(places: list[str], functions: list[str] | None = None) -> tuple[Node, ...]:
    """``x = layer(x, c)`` at each place; results are %2, %3, ..."""
    names = functions or ["layer"] * len(places)
    inputs = [X, *(value(2 + i) for i in range(len(places)))]
    steps = enumerate(zip(places, names, strict=True))
    return tuple(call(at, inputs[i], 2 + i, function=name) for i, (at, name) in steps)


def summary(body: tuple[Node, ...]) -> list[tuple[Any, ...]]:
    return [
        (n.op, n.attrs["function"], n.attrs["at"], n.attrs.get("start"), n.attrs.get("stop"))
        for n in body
    ]


def layers(*numbers: int) -> list[str]:
    return [f"layers.{number}" for number in numbers]


def test_a_run_becomes_a_loop() -> None:
    body = roll(chain(layers(0, 1, 2)), (value(4),))
    assert summary(body) == [("loop", "layer", "layers", 0, 3)]
    (loop,) = body
    assert (loop.inputs, loop.outputs, loop.where) == ((X, C), (value(4),), "toy.py:2")


def test_a_run_need_not_start_at_zero_nor_be_alone() -> None:
    body = roll(chain(["embed.0", *layers(4, 5), "norm"]), (value(5),))
    assert summary(body) == [
        ("call", "layer", "embed.0", None, None),
        ("loop", "layer", "layers", 4, 6),
        ("call", "layer", "norm", None, None),
    ]


@pytest.mark.parametrize(
    "places", [["layers.0"], layers(0, 2), layers(1, 0), layers(0, 0), ["a", "b"], ["0", "1"],
               ["a.0", "b.1"], ["layers.0.x", "layers.1.x"]]
)  # fmt: skip
def test_other_places_stay_calls(places: list[str]) -> None:
    assert roll(chain(places), (value(1 + len(places)),)) == chain(places)


def test_what_is_read_in_between_stays() -> None:
    body = chain(layers(0, 1, 2, 3))
    # as a result of the function
    assert [n.op for n in roll(body, (value(5), value(3)))] == ["loop", "loop"]
    # by a node that stands later
    later = Node("add", (value(3), value(5)), (value(9),))
    assert [n.op for n in roll((*body, later), (value(9),))] == ["loop", "loop", "add"]
    # by a node that stands between
    between = Node("neg", (value(3),), (value(9),))
    split = (*body[:2], between, *body[2:])
    assert [n.op for n in roll(split, (value(5), value(9)))] == ["loop", "neg", "loop"]
    # by the next call, once more
    twice = (body[0], call("layers.1", value(2), 3, more=(value(2),)))
    assert roll(twice, (value(3),)) == twice


def test_an_effect_in_between_stays() -> None:
    """Nothing is moved over a node, whether or not it touches what passes."""
    write = Node("state_write", (X, C, C), (), {"state": "k", "shape": ("R", "T")})
    body = chain(layers(0, 1))
    assert [n.op for n in roll((body[0], write, body[1]), (value(3),))] == [
        "call",
        "state_write",
        "call",
    ]


def test_other_constants_stay_calls() -> None:
    body = (call("layers.0", X, 2), call("layers.1", value(2), 3, more=(X,)))
    assert roll(body, (value(3),)) == body


def test_alternating_functions_roll_by_runs() -> None:
    """Five windowed layers and one that sees everything, twice, as in Gemma."""
    names = (["sliding"] * 5 + ["full"]) * 2
    body = roll(chain(layers(*range(12)), names), (value(13),))
    assert summary(body) == [
        ("loop", "sliding", "layers", 0, 5),
        ("call", "full", "layers.5", None, None),
        ("loop", "sliding", "layers", 6, 11),
        ("call", "full", "layers.11", None, None),
    ]
    by_turns = chain(layers(0, 1, 2, 3), ["a", "b", "a", "b"])
    assert roll(by_turns, (value(5),)) == by_turns


def test_a_loop_may_carry_two_values() -> None:
    def pair(at: int, inputs: tuple[Value, ...], first: int) -> Node:
        attrs = {"function": "layer", "at": f"layers.{at}"}
        return Node("call", (*inputs, C), (value(first), value(first + 1)), attrs)

    body = (pair(0, (X, X), 2), pair(1, (value(2), value(3)), 4))
    assert [n.op for n in roll(body, (value(4), value(5)))] == ["loop"]
    crossed = (pair(0, (X, X), 2), pair(1, (value(3), value(2)), 4))
    assert roll(crossed, (value(4), value(5))) == crossed


def test_layers_of_a_model_roll() -> None:
    def shapes(**changes: Any) -> list[tuple[Any, ...]]:
        program = Llama().program(f0_config(num_hidden_layers=6, **changes))
        return summary(tuple(n for n in program.functions["model"].body if "at" in n.attrs))

    assert shapes() == [("loop", "layer", "layers", 0, 6)]
    pattern = ["sliding_attention"] * 2 + ["full_attention"]
    by_kind = shapes(sliding_window=4, layer_types=pattern * 2)
    assert [(op, start, stop) for op, _, _, start, stop in by_kind] == [
        ("loop", 0, 2),
        ("call", None, None),
        ("loop", 3, 5),
        ("call", None, None),
    ]


# --- expand and inline ------------------------------------------------------------------------


def every_op(program: Program) -> set[str]:
    return {node.op for function in program.all_functions() for node in function.body}


def test_expanding_leaves_primitives_calls_and_loops() -> None:
    program = Llama().program(f0_config())
    expanded = expand(program)
    check(expanded)
    assert every_op(expanded) <= set(PRIMITIVES) | {"call", "loop"}
    assert not every_op(program) & {"exp", "rsqrt", "matmul"}
    assert expand(expanded) == expanded


def test_what_is_claimed_stays() -> None:
    program = Llama().program(f0_config())
    claimed = {"attention", "linear", "sample"}
    assert every_op(expand(program, claimed)) & set(COMPOSITES) == claimed
    # A composite inside another's body may be claimed, too.
    assert every_op(expand(program, {"gumbel"})) & set(COMPOSITES) == {"gumbel"}
    assert expand(program, COMPOSITES) == program


def test_expanded_nodes_keep_the_family_s_line() -> None:
    program = expand(Llama().program(f0_config()))
    lines = {node.where.partition(":")[0] for node in program.functions["layer"].body}
    assert lines == {"llama.py"}


def test_an_input_that_nothing_uses_keeps_its_number() -> None:
    """Fresh values do not collide with it."""
    unused = value(3)
    silu = Node("silu", (X,), (value(1),))
    function = Function("f", (X, unused), (silu,), (value(1), unused))
    expanded = expand_function(function)
    made = [v.index for node in expanded.body for v in node.outputs]
    assert not set(made) & {0, 3}
    assert len(set(made)) == len(made)
    assert expanded.outputs[1] == unused


@pytest.mark.parametrize("entry", ["forward", "extend", "decode_sample"])
def test_inlining_leaves_one_function_with_full_paths(entry: str) -> None:
    program = Llama().program(f0_config())
    flat = flattened(program, [entry])
    # Without a cache no state is reached.
    check(dataclasses.replace(flat, states=() if entry == "forward" else program.states))
    body = flat.entries[entry].body
    assert not any(node.op in ("call", "loop") for node in body)
    paths = [node.attrs["path"] for node in body if node.op == "parameter"]
    assert sorted(paths) == sorted(p.path for p in program.parameters)


def flattened(program: Program, entries: Any = None) -> Program:
    """Without functions."""
    names = program.entries if entries is None else entries
    flat = {name: inline_entry(program, name) for name in names}
    return dataclasses.replace(program, functions={}, entries=flat)


# --- the same numbers -------------------------------------------------------------------------

SIZE, HEADS, VOCAB = 8, 2, 13


class Steps(Block):
    """A layer of ops drawn at random."""

    def __init__(self, steps: tuple[str, ...]) -> None:
        self.steps = steps
        self.norm = RMSNorm(SIZE, 1e-5)
        self.left = Linear(SIZE, SIZE, bias="bias" in steps)
        self.right = Linear(SIZE, SIZE, bias="bias" in steps)
        self.inner = Inner(steps[0])
        self.cache = KVCache(HEADS, SIZE // HEADS)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        # Siblings: what reads the same input may be joined.
        left, right = self.left(x), self.right(x)
        x = self.norm(x + ops.swiglu(left, right))
        for step in self.steps:
            match step:
                case "silu":
                    x = x + ops.silu(x)
                case "gelu":
                    x = ops.gelu(x, tanh=True) - ops.gelu(-x, tanh=False)
                case "softmax":
                    x = x * ops.softmax(x)
                case "again":
                    x = self.inner(x) + self.inner(x * 0.5)
                case "attend":
                    cos, sin = ops.rope_table(span.positions, frequencies=(1.0, 0.25))
                    q = ops.rope(ops.reshape(x, batch, length, HEADS, 4), cos, sin)
                    k, v = self.cache(q, q * 0.5, span)
                    y = ops.attention(q, k, v, span.positions, scale=0.5, window=3)
                    x = x + ops.reshape(y, batch, length, SIZE)
        if "attend" not in self.steps:  # a state must be used
            k, _ = self.cache(*[ops.reshape(x, batch, length, HEADS, 4)] * 2, span)
        return x


class Inner(Block):
    """A block in a block, of a kind of its own for each kind."""

    def __init__(self, kind: str) -> None:
        self.scale = Param((SIZE,), "scale")
        self.factor = float(len(kind))

    def __call__(self, x: Tensor) -> Tensor:
        return x * read(self.scale) + self.factor


class Random(Decoder):
    """Layers that repeat and differ as drawn."""

    def __init__(self, kinds: list[tuple[str, ...]], tied: bool) -> None:
        self.embed = Embedding(VOCAB, SIZE)
        self.layers = [Steps(kind) for kind in kinds]
        self.head = Linear(SIZE, VOCAB, tied_to=self.embed if tied else None)
        self.inner = Inner("head")

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, span)
            if "again" not in layer.steps:
                x = layer.inner(x)
        return self.inner(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def weights(program: Program) -> dict[str, Any]:
    """Every parameter, drawn by its path; a joined one is made of its parts."""
    known = {p.path: p for p in program.parameters}

    def draw(path: str, shape: tuple[int, ...], role: str) -> Any:
        parameter = dataclasses.replace(
            next(iter(known.values())), path=path, shape=shape, role=role, tied_to=None, parts=()
        )
        return random_values(parameter, 0).astype(np.float64)

    found = {}
    for path, parameter in known.items():
        if parameter.parts:
            rows = parameter.shape[0] // len(parameter.parts)
            shape = (rows, *parameter.shape[1:])
            parts = [draw(part, shape, parameter.role) for part in parameter.parts]
            found[path] = np.concatenate(parts)
        else:
            source = known[parameter.tied_to] if parameter.tied_to else parameter
            found[path] = draw(source.path, source.shape, source.role)
    return found


def results(program: Program) -> list[Any]:
    """Logits of a forward, of two chunks, of decoding with an idle row; and the states."""
    states = {
        s.path: np.zeros([{"R": 3, "T": 9}.get(d, d) for d in s.type.shape]) for s in program.states
    }
    machine = Interpreter(program, weights(program), states, DType.F64)

    def ints(*numbers: Any) -> Any:
        return np.array(numbers, np.int32)

    tokens = ints([3, 1, 4, 1], [5, 9, 2, 6])
    runs = [
        ("forward", [tokens]),
        ("extend", [tokens, ints(2, 0), ints(0, 0), ints(4, 2)]),
        ("extend", [tokens[:, :3], ints(0, 2), ints(2, 4), ints(3, 1)]),
        ("decode_greedy", [ints(7, 7, 7), ints(5, -1, 5)]),
    ]
    found: list[Any] = []
    for entry, inputs in runs:
        found += machine.run(entry, inputs)
    return [*found, *states.values()]


STEPS = ("silu", "gelu", "softmax", "again", "attend", "bias")
kinds = st.lists(st.sampled_from(STEPS), min_size=1, max_size=3).map(tuple)
models = st.lists(kinds, min_size=1, max_size=2).flatmap(
    lambda pool: st.lists(st.sampled_from(pool), min_size=1, max_size=4)
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(models, st.booleans())
def test_passes_keep_what_a_random_model_computes(
    monkeypatch: pytest.MonkeyPatch, pattern: list[tuple[str, ...]], tied: bool
) -> None:
    program = trace_decoder("toy", Random(pattern, tied))
    with monkeypatch.context() as patch:
        patch.setattr(trace, "roll", lambda body, outputs: body)
        unrolled = trace_decoder("toy", Random(pattern, tied))
    looped = any(n.op == "loop" for f in program.all_functions() for n in f.body)
    same = any(a == b and "again" in a for a, b in itertools.pairwise(pattern))
    assert looped == same

    wanted = results(program)
    for other in (
        unrolled,
        expand(program),
        expand(program, {"attention", "silu"}),
        flattened(program),
        flattened(expand(program)),
        expand(flattened(program)),
        from_json(to_json(expand(program))),
    ):
        for one, two in zip(wanted, results(other), strict=True):
            np.testing.assert_array_equal(one, two)

    joined = join_linears(program)
    check(joined)
    assert sum(node.op == "linear" for node in joined.functions["steps"].body) == 1
    for one, two in zip(wanted, results(joined), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)


# --- join -------------------------------------------------------------------------------------


class Siblings(Decoder):
    """Linears in every relation."""

    def __init__(self, body: Callable[["Siblings", Tensor], Tensor], bias: bool = False) -> None:
        self.body = body
        self.embed = Embedding(VOCAB, SIZE)
        self.a, self.b = Linear(SIZE, 4, bias=bias), Linear(SIZE, 6)
        self.head = Linear(SIZE, VOCAB)

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        return self.body(self, self.embed(tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def joined(body: Callable[[Siblings, Tensor], Tensor], bias: bool = False) -> Program:
    program = join_linears(trace_decoder("toy", Siblings(body, bias)))
    check(program)
    return program


def both(model: Siblings, x: Tensor) -> Tensor:
    return x + ops.concat_last(model.a(x), ops.slice_last(model.b(x), 0, 4))


def test_siblings_become_one_parameter_with_parts() -> None:
    program = joined(both)
    (made,) = [p for p in program.parameters if p.parts]
    assert (made.path, made.shape, made.role) == ("a+b.weight", (10, SIZE), "linear")
    assert made.parts == ("a.weight", "b.weight")
    assert {p.path for p in program.parameters} == {
        "a+b.weight", "embed.weight", "head.weight"
    }  # fmt: skip
    assert from_json(to_json(program)) == program
    assert join_linears(program) == program


def test_a_tied_parameter_is_not_joined() -> None:
    """Two heads on one hidden state, one of them the embedding."""

    class Heads(Siblings):
        def __init__(self) -> None:
            super().__init__(both)
            self.second = Linear(SIZE, VOCAB)
            self.head = Linear(SIZE, VOCAB, tied_to=self.embed)

        def logits(self, hidden: Tensor) -> Tensor:
            return self.head(hidden) + self.second(hidden)

    program = trace_decoder("toy", Heads())
    after = join_linears(program)
    check(after)
    assert [p.parts for p in after.parameters if p.parts] == [("a.weight", "b.weight")]
    assert after.parameter("head.weight").tied_to == "embed.weight"


def test_a_bias_on_one_alone_keeps_them_apart() -> None:
    assert not any(p.parts for p in joined(both, bias=True).parameters)


def test_other_inputs_keep_them_apart() -> None:
    program = joined(
        lambda m, x: x + ops.concat_last(m.a(x), ops.slice_last(m.b(ops.silu(x)), 0, 4))
    )
    assert not any(p.parts for p in program.parameters)
