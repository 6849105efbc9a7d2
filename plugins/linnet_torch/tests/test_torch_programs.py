"""Programs unlike Llama: ops that it lacks, and layers that differ, against the reference."""

from pathlib import Path

import numpy as np
import pytest

from linnet.plugins.interfaces import LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.spec import (
    Block,
    Decoder,
    DType,
    Embedding,
    KVCache,
    Linear,
    Param,
    Program,
    Span,
    Tensor,
    trace_decoder,
)
from linnet.spec import composites as ops
from linnet.spec.blocks import State, read
from linnet.spec.trace import apply, current, perform
from linnet.testing.backends import ints, tokens_of
from linnet.testing.fixtures import random_values
from linnet.weights.binding import BoundModel, BoundParameter
from linnet.weights.checkpoint import Checkpoint
from linnet_torch.backend import TorchBackend

SIZE = 24


class Mixer(Block):
    """Attention with a window of its own; the rotary covers 4 of 8 dimensions."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.qkv = Linear(SIZE, 3 * SIZE, bias=True)
        self.cache = KVCache(3, 8)

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        batch, length, _ = x.shape
        cos, sin = ops.rope_table(span.positions, frequencies=(1.0, 0.1), scale=1.25)
        qkv = self.qkv(x)
        q, k, v = (
            ops.reshape(ops.slice_last(qkv, i * SIZE, (i + 1) * SIZE), batch, length, 3, 8)
            for i in range(3)
        )
        k, v = self.cache(ops.rope(k, cos, sin), v, span)
        q = ops.rope(q, cos, sin)
        y = ops.attention(q, k, v, span.positions, scale=0.3, window=self.window)
        return ops.reshape(y, batch, length, SIZE)


class Odds(Block):
    """One of each op that Llama does without."""

    def __init__(self) -> None:
        self.scale = Param((SIZE,), "scale")
        self.bias = Param((SIZE,), "bias")
        self.cube = Param((2, 3, 4), "linear")

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        scale, bias = read(self.scale), read(self.bias)
        batch, length, _ = x.shape
        h = ops.layer_norm(x, scale, bias, eps=1e-3) + ops.layer_norm(x, scale, eps=1e-2)
        h = ops.gelu(h, tanh=True) - ops.gelu(h, tanh=False) / 3.0
        h = h + ops.sigmoid(h) * ops.softmax(h) + ops.silu(h)
        table = ops.constant(tuple(i * 0.125 for i in range(SIZE)), DType.FLOAT)
        h = apply("maximum", h, table) + apply("minimum", h, bias) + apply("minimum", 0.5, h)
        late = apply("eq", positions, apply("maximum", positions, 3))
        sign = ops.where(late, ops.scalar(1.0, DType.FLOAT), ops.scalar(-0.5, DType.FLOAT))
        return h * ops.reshape(sign, batch, length, 1) + self.corner(read(self.cube))

    def corner(self, cube: Tensor) -> Tensor:
        """A row of ``SIZE`` numbers, out of gathers, joins and slices of ``cube[2, 3, 4]``."""
        twice = ops.constant((1, 0), DType.I32)
        column = ops.gather(cube, ops.constant((2, 1), DType.I32), axis=1)  # [2, 4]
        six = ops.reshape(ops.constant((3, 0, 2, 1, 1, 0), DType.I32), 2, 3)
        picked = ops.gather(cube, six, axis=2)  # [2, 3]
        swapped = ops.gather(cube, twice, axis=0)
        middle = apply("slice", swapped, axis=1, start=1, stop=3)  # [2, 2, 4]
        joined = apply("concat", middle, ops.transpose(middle, 1, 0, 2), axis=1)  # [2, 4, 4]
        ranked = apply("sort", joined) + apply("cumsum", joined)
        summed = ops.reshape(apply("reduce_sum", ranked, axis=0), 16)
        narrow = ops.concat_last(ops.reshape(column, 8), ops.reshape(picked, 6))
        parts = [summed, ops.slice_last(narrow, 3, 11)]
        return ops.concat_last(*parts)


class Layer(Block):
    """A mixer and odds, over and over."""

    def __init__(self, window: int | None) -> None:
        self.mixer = Mixer(window)
        self.odds = Odds()

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        return self.odds(x + self.mixer(x, span), span.positions)


class OddDecoder(Decoder):
    """Layers with windows that differ, and so no loop."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.embed = Embedding(136, SIZE)
        self.layers = [Layer(window) for window in windows]
        self.head = Linear(SIZE, 136)

    def hidden(self, tokens: Tensor, span: Span) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, span)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)


def model_of(program: Program) -> BoundModel:
    parameters = {}
    for p in program.parameters:
        values = random_values(p, 0)
        parameters[p.path] = BoundParameter(
            p.path, p.shape, DType.F32, lambda values=values: values
        )
    checkpoint = Checkpoint(Path("odd"), "memory", {}, {})
    return BoundModel(program, checkpoint, parameters, 136, 64, {})


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("windows", [(None, 5, None), (3, 3), (None,)], ids=str)
def test_an_odd_program(windows: tuple[int | None, ...], numerics: str) -> None:
    model = model_of(trace_decoder("odd", OddDecoder(windows)))
    options = LoadOptions(dtype="f32", rows=3, max_seq=40, threads=2, numerics=numerics)
    ours = TorchBackend().load(model, options)
    theirs = ReferenceBackend().load(model, LoadOptions(dtype="f64", rows=3, max_seq=40))

    def both(entry: str, live: object = slice(None), **inputs: object) -> None:
        tested, reference = (session.run(entry, inputs) for session in (ours, theirs))
        assert np.isfinite(tested).all()
        np.testing.assert_allclose(tested[live], reference[live], atol=1e-4, rtol=1e-5)

    both("forward", tokens=tokens_of(2, 30))
    where = {"rows": ints(2, 0), "starts": ints(0, 0), "lengths": ints(20, 3)}
    both("extend", tokens=tokens_of(2, 20), **where)
    both("decode", [0, 2], tokens=ints(4, 5, 6), positions=ints(3, -1, 20))
    where = {"rows": ints(0), "starts": ints(4), "lengths": ints(17)}
    both("extend", tokens=tokens_of(1, 17, seed=1), **where)
    source = ours.source()
    assert source.count("def attend(") == (numerics == "fast")
    # Each kind of mask is made once for each entry, not once for each layer.
    if numerics == "fast":
        body = source[source.index("def decode(") : source.index("def extend_greedy(")]
        assert body.count("visible_keys(") == len(set(windows))
        assert body.count("cache_slots(") == 1


def test_the_run_s_dtype_reaches_functions_that_see_no_float() -> None:
    """A function of positions alone, as sinusoidal embeddings are."""

    class Sinusoid(Block):
        def __call__(self, positions: Tensor) -> Tensor:
            batch, length = positions.shape
            turns = ops.constant(tuple(0.1 * i for i in range(SIZE)), DType.F32)
            angles = ops.cast(ops.reshape(positions, batch, length, 1), DType.F32) * turns
            return ops.cast(apply("sin", angles), DType.FLOAT)

    class Model(Decoder):
        def __init__(self) -> None:
            self.embed = Embedding(136, SIZE)
            self.sinusoid = Sinusoid()
            self.mixer = Mixer(None)
            self.head = Linear(SIZE, 136)

        def hidden(self, tokens: Tensor, span: Span) -> Tensor:
            return self.mixer(self.embed(tokens) + self.sinusoid(span.positions), span)

        def logits(self, hidden: Tensor) -> Tensor:
            return self.head(hidden)

    model = model_of(trace_decoder("sinusoid", Model()))
    tokens = tokens_of(2, 9)
    reference = ReferenceBackend().load(model, LoadOptions(max_seq=40))
    expected = reference.run("forward", {"tokens": tokens})
    for dtype, most in (("f32", 1e-4), ("bf16", 0.1)):
        session = TorchBackend().load(model, LoadOptions(dtype=dtype, max_seq=40, threads=2))
        logits = session.run("forward", {"tokens": tokens})
        np.testing.assert_allclose(logits, expected, atol=most, rtol=0)
    assert "dtype: torch.dtype" in session.source()


class Memory(Block):
    """A state that is read before it is written, read after, written again, and left at that."""

    def __init__(self) -> None:
        self.kept = State((2, 12))
        self.log = State((SIZE,))

    def __call__(self, x: Tensor, span: Span) -> Tensor:
        if span.starts is None or span.lengths is None:
            return x
        batch, length, _ = x.shape
        rows = [] if span.rows is None else [span.rows]
        where = [span.starts, span.lengths, *rows]
        builder = current()
        kept, log = (
            {"state": builder.local(builder.tracer.path(state)), "shape": state.full_shape}
            for state in (self.kept, self.log)
        )
        heads = ops.reshape(x, batch, length, 2, 12)
        before = apply("state_read", *rows, **kept)
        perform("state_write", heads, *where, **kept)
        after = apply("state_read", *rows, **kept)
        perform("state_write", heads * 0.5, *where, **kept)
        perform("state_write", x, *where, **log)
        new = ops.attention(heads, after, after, span.positions, scale=0.3)
        old = ops.attention(heads, before, before, span.positions, scale=0.3)
        return x + ops.reshape(new - old, batch, length, SIZE)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_states_read_and_written_in_any_order(numerics: str) -> None:
    class Model(Decoder):
        def __init__(self) -> None:
            self.embed = Embedding(136, SIZE)
            self.memory = Memory()
            self.head = Linear(SIZE, 136)

        def hidden(self, tokens: Tensor, span: Span) -> Tensor:
            return self.memory(self.embed(tokens), span)

        def logits(self, hidden: Tensor) -> Tensor:
            return self.head(hidden)

    model = model_of(trace_decoder("memory", Model()))
    options = LoadOptions(dtype="f32", rows=3, max_seq=40, threads=2, numerics=numerics)
    ours, theirs = TorchBackend().load(model, options), ReferenceBackend().load(model, options)
    where = {"rows": ints(2, 0), "starts": ints(0, 0), "lengths": ints(9, 4)}
    one = {"rows": ints(0), "starts": ints(3), "lengths": ints(5)}
    for inputs in ({"tokens": tokens_of(2, 9), **where}, {"tokens": tokens_of(1, 5), **one}):
        tested, reference = (session.run("extend", inputs) for session in (ours, theirs))
        np.testing.assert_allclose(tested, reference, atol=1e-5, rtol=1e-5)
    for _ in range(2):  # a step is an extend by one token
        step = {"tokens": ints(4, 5, 6), "positions": ints(8, -1, 9)}
        where = {"rows": ints(0, 2), "starts": ints(8, 9), "lengths": ints(1, 1)}
        tested = ours.run("decode", step)[[0, 2]]
        reference = theirs.run("extend", {"tokens": ints(4, 6).reshape(2, 1), **where})
        np.testing.assert_allclose(tested, reference, atol=1e-5, rtol=1e-5)
    for path in ("kept", "log"):
        cache = getattr(ours._state.memory, path)[:, :-1].numpy()
        np.testing.assert_allclose(cache, theirs._interpreter.states[f"memory.{path}"], atol=1e-6)
