"""Families that are wrong: every error names the block, the op, both shapes and the line."""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from linnet.errors import SpecError
from linnet.spec import (
    Block,
    Decoder,
    DType,
    Embedding,
    KVCache,
    Linear,
    Param,
    Program,
    RMSNorm,
    Span,
    State,
    Tensor,
    fingerprint,
    trace_decoder,
)
from linnet.spec import composites as ops
from linnet.spec.trace import apply, read

HIDDEN, HERE = 48, r"test_spec_tracing\.py"


class Toy(Decoder):
    """A decoder around one block."""

    def __init__(self, block: Block) -> None:
        self.embed = Embedding(136, HIDDEN)
        self.block = block
        self.head = Linear(HIDDEN, 136)

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        return self.block(self.embed(tokens), span)  # the toy's line

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def trace(block: Block) -> Program:
    return trace_decoder("toy", Toy(block))


def line_of(function: Callable[..., Any], mark: str) -> str:
    """Where the code of ``function`` has the mark, as errors write it."""
    lines, start = inspect.getsourcelines(function)
    (offset,) = [index for index, line in enumerate(lines) if mark in line]
    return f"test_spec_tracing.py:{start + offset}"


class Swapped(Block):
    def __init__(self) -> None:
        self.up = Linear(80, HIDDEN)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return self.up(x)  # here


class Unequal(Block):
    def __init__(self) -> None:
        self.up = Linear(HIDDEN, 80)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return x + self.up(x)  # here


class Mixed(Block):
    def __init__(self) -> None:
        self.norm = RMSNorm(HIDDEN, 1e-5)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        wide = ops.cast(self.norm(x), DType.F32)
        return x * wide  # here


class Inside(Block):
    """The complaint comes from deep inside a composite."""

    def __init__(self) -> None:
        self.q = Linear(HIDDEN, 96)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        q = ops.reshape(self.q(x), batch, length, 6, 16)
        v = ops.cast(q, DType.F32)
        y = ops.attention(q, q, v, span.positions, scale=0.25)  # here
        return ops.reshape(y, batch, length, 96)


class Wrong(Block):
    """Does as it is told, which is wrong."""

    def __init__(self, body: Callable[[Tensor, Span], Any]) -> None:
        self.body = body

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return self.body(x, span)


class Fresh(Block):
    """Makes a parameter in the call."""

    def __init__(self) -> None:
        self.keep = RMSNorm(HIDDEN, 1e-5)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return Linear(HIDDEN, HIDDEN)(self.keep(x))  # here


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (
            Swapped,
            "linear(float[B, S, 48], float[48, 80]): the input's last size is 48, the weight's 80",
        ),
        (
            Unequal,
            "add(float[B, S, 48], float[B, S, 80]): sizes 48 and 80 at axis -1 do not broadcast",
        ),
        (
            Mixed,
            "mul(float[B, S, 48], f32[B, S, 48]): dtypes float and f32 differ; cast one of them",
        ),
        (
            Inside,
            "attention(float[B, S, 6, 16], float[B, S, 6, 16], f32[B, S, 6, 16], i32[B, S]): "
            "inside it, attention: matmul(float[B, 6, 1, S, S], f32[B, 6, 1, S, 16]): "
            "dtypes float and f32 differ; cast one of them",
        ),
        (
            Fresh,
            "uses a Param that is not an attribute of the model; blocks, parameters and states "
            "are made in __init__, not in the call",
        ),
    ],
)
def test_an_error_names_block_op_shapes_and_line(block: type[Block], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        trace(block())
    where = line_of(block.__call__, "# here")
    assert str(caught.value) == f"{block.__name__} at block: {complaint} ({where})"


def test_an_error_in_the_decoder_itself_names_it() -> None:
    class Narrow(Toy):
        def logits(self, hidden: Tensor) -> Tensor:
            return hidden + ops.scalar(1, DType.I32)

    with pytest.raises(SpecError, match=r"^Narrow: add\(float\[B, S, 48\], i32\[\]\): dtypes"):
        trace_decoder("toy", Narrow(Wrong(lambda x, span: x)))


def first(x: Tensor, span: Span) -> Tensor:
    return x if x else -x


def second(x: Tensor, span: Span) -> Tensor:
    return x if span.positions == 0 else -x


WRONG: list[tuple[Callable[[Tensor, Span], Any], str]] = [
    (first, r"a symbolic float\[B, S, 48\] has no truth value; use where\(\)"),
    (second, r"a symbolic i32\[B, S\] cannot be compared with =="),
    (lambda x, span: x != 1.0, r"cannot be compared with =="),
    (lambda x, span: x in [span.positions], r"cannot be compared with =="),
    (lambda x, span: None, r"returns None, not a tensor"),
    (lambda x, span: [x], r"returns \[.*\], not a tensor or a tuple of tensors"),
    (lambda x, span: span, r"returns Span\(.*\), not a tensor"),
    (lambda x, span: x + None, r"add takes tensors, and numbers beside them, not None"),
    (lambda x, span: x + True, r"add takes tensors, and numbers beside them, not True"),
    (lambda x, span: apply("add", 1, 2), r"add takes tensors, and numbers beside them, not 1"),
    (lambda x, span: span.positions + 0.5, r"add: 0\.5 is not a value of i32"),
    (lambda x, span: span.positions + 2**40, r"add: 1099511627776 is not a value of i32"),
    (lambda x, span: x * float("inf"), r"mul: values is \(inf,\), not a tuple of finite"),
    (lambda x, span: apply("sqrt", x), r"sqrt\(float\[B, S, 48\]\): is not a primitive"),
    (lambda x, span: ops.cast(x, "f33"), r"cast\(.*\): dtype is 'f33', not a dtype"),
    (lambda x, span: ops.reshape(x, -1), r"reshape\(.*\): shape is \(-1,\), not a tuple of sizes"),
    (lambda x, span: apply("sort", x, axis=0), r"takes the attributes none, not axis"),
    (lambda x, span: ops.linear(x), r"linear\(.*\): missing a required argument: 'weight'"),
    (lambda x, span: ops.silu(x, x), r"silu\(.*\): too many positional arguments"),
    (lambda x, span: ops.silu(x, wide=True), r"got an unexpected keyword argument 'wide'"),
    (lambda x, span: ops.gelu(x, tanh=1), r"gelu\(.*\): tanh is 1, not bool"),
    (lambda x, span: ops.rms_norm(x, x, eps="1"), r"eps is '1', not float"),
    (lambda x, span: ops.rms_norm(x, x, eps=float("nan")), r"eps is nan, not float"),
    (lambda x, span: ops.linear(x, weight=x), r"weight is an input, not an attribute"),
    (
        lambda x, span: ops.rope_table(span.positions, frequencies=[1.0])[0],
        r"frequencies is \[1\.0\], not tuple\[float, \.\.\.\]",
    ),
    (
        lambda x, span: ops.attention(x, x, x, span.positions, scale=1.0, window=2.0),
        r"window is 2\.0, not int \| None",
    ),
    (lambda x, span: read(Param((3,), "bias")), r"uses a Param that is not an attribute"),
    (lambda x, span: RMSNorm(HIDDEN, 1e-5)(x), r"uses a Param that is not an attribute"),
    (lambda x, span: KVCache(2, 8)(x, x, Span(x, x, x))[0], r"uses a State that is not an attr"),
    (lambda x, span: Fresh()(span, x), r"uses a Fresh that is not an attribute of the model"),
]


@pytest.mark.parametrize(("body", "complaint"), WRONG)
def test_what_a_block_does_wrong_is_said(
    body: Callable[[Tensor, Span], Any], complaint: str
) -> None:
    with pytest.raises(SpecError, match=rf"Wrong at block: .*{complaint}.* \({HERE}:\d+\)$"):
        trace(Wrong(body))


class Leaker(Block):
    """Hands a tensor to another block behind its back."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None
        self.taker = Wrong(lambda x, span: self.kept)
        self.adder = Wrong(lambda x, span: x + self.kept)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        self.kept = x * 2.0
        return getattr(self, self.which)(x, span)

    which = ""


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("taker", r"returns float\[B, S, 48\] of another block: pass it as an argument"),
        ("adder", r"add\(.*\): float\[B, S, 48\] belongs to another block; pass it as an argument"),
    ],
)
def test_a_tensor_stays_in_its_block(which: str, complaint: str) -> None:
    leaker = Leaker()
    leaker.which = which
    with pytest.raises(SpecError, match=rf"Wrong at block\.{which}: {complaint}"):
        trace(leaker)


def test_ops_need_a_block() -> None:
    with pytest.raises(SpecError, match=r"call them in a block that trace_decoder\(\) is tracing"):
        ops.iota(3)
    with pytest.raises(SpecError, match="trace_decoder"):
        Fresh()(None, None)


def test_one_thing_in_two_places_is_refused() -> None:
    class Shared(Wrong):
        def __init__(self) -> None:
            super().__init__(lambda x, span: self.two[1](x))
            self.one = Linear(HIDDEN, HIDDEN)
            self.two = [Linear(HIDDEN, HIDDEN), self.one]

    with pytest.raises(SpecError, match=r"one Linear is at both block\.one and block\.two\.1"):
        trace(Shared())


def test_a_block_that_holds_its_owner_is_refused() -> None:
    class Child(Wrong):
        def __init__(self) -> None:
            super().__init__(lambda x, span: x)
            self.parent: Block | None = None

    child = Child()
    model = Toy(child)
    child.parent = model
    with pytest.raises(SpecError, match=r"one Toy is at both the top and block\.parent"):
        trace_decoder("toy", model)


def test_a_parameter_that_nothing_reads_is_refused() -> None:
    class Idle(Wrong):
        def __init__(self) -> None:
            super().__init__(lambda x, span: x)
            self.scale = Param((3,), "scale")

    with pytest.raises(SpecError, match=r"parameter block\.scale is declared but never used"):
        trace(Idle())


def test_a_state_needs_a_block() -> None:
    def inside(x: Tensor, span: Span) -> Tensor:
        return ops.silu(x)

    class Stateful(Wrong):
        def __init__(self) -> None:
            super().__init__(inside)
            self.state = State((3,))

    with pytest.raises(SpecError, match=r"state block\.state is declared but never used"):
        trace(Stateful())


def test_numbers_take_the_dtype_of_the_tensor() -> None:
    def body(x: Tensor, span: Span) -> Tensor:
        later = ops.reshape(apply("lt", 2, span.positions), *x.shape[:2], 1)
        sign = ops.where(later, 1.0 - x, 2 / (x - 3))
        return -sign / 2 + 1

    program = trace(Wrong(body))
    constants = {
        (node.attrs["values"], node.attrs["dtype"])
        for node in program.functions["wrong"].body
        if node.op == "constant"
    }
    wanted = {((2,), "i32"), ((1.0,), "float"), ((2.0,), "float"), ((3.0,), "float")}
    assert constants == wanted
    assert all(type(values[0]) is (int if dtype == "i32" else float) for values, dtype in constants)


def test_alike_blocks_are_one_function_and_others_are_not() -> None:
    class Pair(Block):
        def __init__(self, eps: float) -> None:
            self.a = Scale(1e-5)
            self.b = Scale(eps)

        def __call__(self, x: Tensor, span: Span) -> Tensor:
            return self.b(self.a(x))

    class Scale(Block):
        def __init__(self, eps: float) -> None:
            self.norm = RMSNorm(HIDDEN, eps)

        def __call__(self, x: Tensor) -> Tensor:
            return self.norm(x)

    names = [set(trace(Pair(eps)).functions) for eps in (1e-5, 1e-6)]
    # With a cache a pair gets more of the span, and decoding has a size of its own, R.
    assert names[0] == {"scale", "pair", "pair_extend", "scale_decode", "pair_decode"}
    assert names[1] == names[0] | {"scale_forward", "scale_decode_2"}


def test_a_block_may_be_called_like_a_keyword() -> None:
    class Lambda(Wrong):
        pass

    assert set(trace(Lambda(lambda x, span: -x)).functions) >= {"lambda_", "lambda__decode"}


def test_names_of_entries_and_of_their_inputs() -> None:
    program = trace(Wrong(lambda x, span: x))
    assert {name: [v.name for v in e.inputs] for name, e in program.entries.items()} == {
        "forward": ["tokens"],
        "extend": ["tokens", "rows", "starts", "lengths"],
        "decode": ["tokens", "positions"],
        "extend_greedy": ["tokens", "rows", "starts", "lengths"],
        "decode_greedy": ["tokens", "positions"],
        "extend_sample": ["tokens", "rows", "starts", "lengths", *OPTIONS],
        "decode_sample": ["tokens", "positions", *OPTIONS],
    }
    results = {name: str(e.outputs[0].type) for name, e in program.entries.items()}
    assert results == {
        "forward": "f32[B, S, 136]",
        "extend": "f32[B, 136]",
        "decode": "f32[R, 136]",
        "extend_greedy": "i32[B]",
        "decode_greedy": "i32[R]",
        "extend_sample": "i32[B]",
        "decode_sample": "i32[R]",
    }


OPTIONS = ["seeds", "temperature", "top_k", "top_p", "min_p"]


def test_a_node_knows_its_line_and_a_composite_s_body_has_none() -> None:
    program = trace(Unequal2())
    nodes = {node.op: node for node in program.functions["unequal2"].body}
    assert nodes["silu"].where == line_of(Unequal2.__call__, "# here")
    assert {node.where for node in ops.body_of(nodes["silu"]).body} == {""}


class Unequal2(Block):
    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return ops.silu(x)  # here


def test_a_failed_trace_leaves_nothing_behind() -> None:
    with pytest.raises(SpecError):
        trace(Swapped())
    assert trace(Unequal2()) == trace(Unequal2())


def test_threads_trace_at_once() -> None:
    wanted = fingerprint(trace(Unequal2()))
    found: list[str] = []

    def work() -> None:
        found.extend(fingerprint(trace(Unequal2())) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 12


def test_a_new_composite_is_an_op_like_any_other() -> None:
    def doubled_silu(x: Tensor, *, times: int = 2, label: str = "") -> Tensor:
        return ops.silu(x) * float(times)

    try:
        op = ops.composite(doubled_silu)
        with pytest.raises(ValueError, match="there is an op 'doubled_silu' already"):
            ops.composite(doubled_silu)
        program = trace(Wrong(lambda x, span: op(x, times=3)))
        (node,) = [n for n in program.functions["wrong"].body if n.op == "doubled_silu"]
        assert [n.op for n in ops.body_of(node).body] == ["silu", "constant", "mul"]
        with pytest.raises(SpecError, match=r"times is 3\.5, not int"):
            trace(Wrong(lambda x, span: op(x, times=3.5)))
    finally:
        del ops.COMPOSITES["doubled_silu"]

    def add(x: Tensor) -> Tensor:
        return x

    with pytest.raises(ValueError, match="there is an op 'add' already"):
        ops.composite(add)
