"""What composites compute: their bodies, in NumPy, against formulas written another way."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.errors import SpecError
from linnet.reference.interpreter import Interpreter
from linnet.spec import DType, Function, Program, Tensor, TensorType
from linnet.spec import composites as ops
from linnet.spec.check import check
from linnet.spec.trace import Builder, Tracer, building

Body = Callable[..., Tensor | tuple[Tensor, ...]]
DRAW = np.random.default_rng(7)


def program(body: Body, types: list[TensorType]) -> Function:
    builder = Builder(Tracer({}), "Test", "")
    with building(builder):
        result = body(*(builder.input(type_, f"x{i}") for i, type_ in enumerate(types)))
        return builder.finish("main", result if isinstance(result, tuple) else (result,))


def run(op: Body, *arrays: Any, dtype: DType = DType.F32, **attrs: Any) -> Any:
    """One composite on arrays; one result, or a list of them."""
    kinds = {"f": DType.F32, "i": DType.I32}
    types = [TensorType(kinds[a.dtype.kind], a.shape) for a in arrays]
    main = program(lambda *inputs: op(*inputs, **attrs), types)
    whole = Program("test", (), (), {}, {"main": main})
    check(whole)
    results = Interpreter(whole, {}, {}, dtype).run("main", list(arrays))
    return results[0] if len(results) == 1 else results


def normal(*shape: int) -> Any:
    return DRAW.standard_normal(shape).astype(np.float32)


def ints(*numbers: Any) -> Any:
    return np.array(numbers, np.int32)


def close(one: Any, two: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, two, atol=tolerance, rtol=tolerance)


# --- layers -----------------------------------------------------------------------------------


def test_linear_and_embedding() -> None:
    x, weight, bias = normal(2, 3, 5), normal(4, 5), normal(4)
    close(run(ops.linear, x, weight), np.einsum("bsk,nk->bsn", x, weight))
    close(run(ops.linear, x, weight, bias), np.einsum("bsk,nk->bsn", x, weight) + bias)
    ids = ints([3, 0], [1, 1])
    close(run(ops.embedding, ids, weight), np.stack([[weight[i] for i in row] for row in ids]))


def test_norms() -> None:
    x, scale, bias = normal(2, 3, 8) * 3 + 1, normal(8), normal(8)
    wide = x.astype(np.float64)
    close(
        run(ops.rms_norm, x, scale, eps=0.1),
        wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 0.1) * scale,
    )
    normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.1)
    close(run(ops.layer_norm, x, scale, eps=0.1), normed * scale)
    close(run(ops.layer_norm, x, scale, bias, eps=0.1), normed * scale + bias)


def test_activations() -> None:
    x = np.array([-1e4, -90, -3, -0.5, 0, 0.5, 3, 90, 1e4], np.float32)
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-exact))
    phi = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in exact])
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    close(run(ops.sigmoid, x), sigmoid)
    close(run(ops.silu, x), exact * sigmoid)
    close(run(ops.gelu, x, tanh=False), exact * phi)
    close(run(ops.gelu, x, tanh=True), 0.5 * exact * (1 + np.tanh(inner)))
    close(run(ops.swiglu, x, x[::-1].copy()), exact * sigmoid * exact[::-1], 1e-4)
    y = run(ops.softmax, np.array([[1e4, 1e4, 0], [-3e38, -3e38, -3e38]], np.float32))
    close(y, [[0.5, 0.5, 0], [1 / 3] * 3])


# --- positions and attention ------------------------------------------------------------------


def test_rope_table_is_f32_far_out() -> None:
    positions, frequencies = ints([0, 1, 8191]), (1.0, 0.19392)
    cos, sin = run(ops.rope_table, positions, frequencies=frequencies)
    # The angle itself is rounded to f32, as Transformers rounds it.
    at = positions[..., None].astype(np.float32)
    angles = (at * np.array(frequencies, np.float32)).astype(np.float64)
    assert cos.dtype == sin.dtype == np.float32
    close(cos, np.cos(angles), 1e-6)
    close(sin, np.sin(angles), 1e-6)
    scaled = run(ops.rope_table, positions, frequencies=frequencies, scale=1.5)
    close(scaled[0], 1.5 * np.cos(angles), 1e-6)
    close(scaled[1], 1.5 * np.sin(angles), 1e-6)


@pytest.mark.parametrize("size", [8, 10])
def test_rope_turns_pairs_half_a_head_apart(size: int) -> None:
    x, angles = normal(2, 3, 2, size), normal(2, 3, 4)
    y = run(ops.rope, x, np.cos(angles), np.sin(angles))
    wanted = x.astype(np.float64)
    for i in range(4):
        turned = (x[..., i] + 1j * x[..., i + 4]) * np.exp(1j * angles[..., None, i])
        wanted[..., i], wanted[..., i + 4] = turned.real, turned.imag
    close(y, wanted)


def attention(q: Any, k: Any, v: Any, positions: Any, scale: float, window: int | None) -> Any:
    """One query, one head at a time."""
    batch, length, heads, _ = q.shape
    out = np.zeros((batch, length, heads, v.shape[-1]))
    for b, s, h in np.ndindex(batch, length, heads):
        at, group = positions[b, s], h // (heads // k.shape[2])
        first = 0 if window is None else max(0, at - window + 1)
        seen = range(first, min(at + 1, k.shape[1]))
        scores = np.array([q[b, s, h] @ k[b, j, group] * scale for j in seen])
        weights = np.exp(scores - scores.max())
        values = np.array([v[b, j, group] for j in seen])
        out[b, s, h] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention(window: int | None) -> None:
    """Six heads on two, values of another size, rows at positions of their own."""
    q, k, v = normal(2, 3, 6, 8), normal(2, 11, 2, 8), normal(2, 11, 2, 5)
    positions = ints([0, 1, 2], [8, 9, 10])
    y = run(ops.attention, q, k, v, positions, scale=0.3, window=window)
    close(y, attention(q, k, v, positions, 0.3, window))


def test_an_idle_query_gives_something_finite() -> None:
    q, k = normal(1, 2, 2, 4), normal(1, 3, 1, 4)
    for window in (None, 2):
        y = run(ops.attention, q, k, k, ints([-1, 1]), scale=1.0, window=window)
        assert np.isfinite(y).all()
        close(y[0, 1], attention(q, k, k, ints([0, 1]), 1.0, window)[0, 1])


# --- choosing a token -------------------------------------------------------------------------


def test_greedy_takes_the_first_among_equals() -> None:
    logits = np.array([[0, 3, 3], [-1, -1, -1], [1, 2, 5]], np.float32)
    assert run(ops.greedy, logits).tolist() == [1, 0, 2]


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise by Python's integers."""

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    row = mix(mix((seed + 0x9E3779B9) % 2**32) ^ position % 2**32)
    uniform = ((mix(row ^ token) >> 8) + 0.5) / 2**24
    return -math.log(-math.log(uniform))


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = ints(0, 1, -5, 2**31 - 1), ints(0, 7, 7, 4095)
    y = run(ops.gumbel, seeds, positions, vocab=50)
    wanted = [
        [noise(int(s), int(p), t) for t in range(50)] for s, p in zip(seeds, positions, strict=True)
    ]
    close(y, wanted)
    close(run(ops.gumbel, seeds[2:3], positions[2:3], vocab=20), y[2:3, :20], 0)


def test_noise_is_gumbel() -> None:
    y = run(ops.gumbel, ints(*range(40)), ints(*range(40)), vocab=1000).astype(np.float64)
    assert np.isfinite(y).all()
    assert abs(y.mean() - 0.5772) < 0.03
    assert abs(y.std() - math.pi / math.sqrt(6)) < 0.03
    assert abs(np.corrcoef(y)[np.triu_indices(40, 1)]).max() < 0.2


def choice(logits: Any, position: int, seed: int, t: float, k: int, p: float, m: float) -> int:
    """The token that sampling gives, filter after filter, over lists."""
    if t <= 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / t
    keep = set(range(len(scaled)))
    if k > 0:
        last = sorted(scaled, reverse=True)[min(k, len(scaled)) - 1]
        keep = {i for i in keep if scaled[i] >= last}
    if p < 1:
        order = sorted(keep, key=lambda i: -scaled[i])
        mass = np.exp(scaled[order] - max(scaled))
        before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
        inside = [i for i, b in zip(order, before, strict=True) if b < p] or order[:1]
        keep = {i for i in keep if scaled[i] >= scaled[inside[-1]]}
    keep = {i for i in keep if scaled[i] - max(scaled) >= math.log(max(m, 1e-30))}
    return max(keep, key=lambda i: scaled[i] + noise(seed, position, i))


OPTIONS = st.tuples(
    st.integers(-(2**31), 2**31 - 1),  # seed
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),  # temperature
    st.sampled_from([0, 1, 2, 5, 40, 1000]),  # top_k
    st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0]),  # top_p
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),  # min_p
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 10**6))
def test_sampling_row_by_row(rows: list[tuple[Any, ...]], draw: int) -> None:
    """Every row has options of its own, and gives what it gives alone."""
    logits = np.random.default_rng(draw).standard_normal((len(rows), 40)).astype(np.float32) * 2
    positions = ints(*range(5, 5 + len(rows)))
    seeds, temperature, top_k, top_p, min_p = (np.array(each) for each in zip(*rows, strict=True))
    options = [seeds.astype(np.int32), temperature.astype(np.float32), top_k.astype(np.int32)]
    options += [top_p.astype(np.float32), min_p.astype(np.float32)]
    tokens = run(ops.sample, logits, positions, *options)
    wanted = [choice(logits[i], int(positions[i]), row[0], *row[1:]) for i, row in enumerate(rows)]
    assert tokens.tolist() == wanted
    alone = run(ops.sample, logits[:1], positions[:1], *(option[:1] for option in options))
    assert alone[0] == wanted[0]


def test_tokens_as_likely_as_the_last_one_kept_are_kept() -> None:
    logits = np.array([[1, 2, 2, 2, 0]], np.float32)
    chosen = {
        int(
            run(
                ops.sample, logits, ints(0), ints(seed),
                *(np.array([x], d) for x, d in ((1, "f4"), (1, "i4"), (1, "f4"), (0, "f4"))),
            )[0]
        )
        for seed in range(40)
    }  # fmt: skip
    assert chosen == {1, 2, 3}


def test_filters_are_those_of_transformers() -> None:
    """What is kept: with every seed but those, nothing else is ever drawn."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    for k, p, m in ((0, 1.0, 0.1), (7, 1.0, 0.0), (0, 0.8, 0.0), (9, 0.6, 0.2), (5, 0.01, 0.0)):
        logits = normal(1, 30) * 2
        warpers = [process.TemperatureLogitsWarper(0.7)]
        warpers += [process.TopKLogitsWarper(k)] if k else []
        warpers += [process.TopPLogitsWarper(p)] if p < 1 else []
        warpers += [process.MinPLogitsWarper(m)] if m else []
        scores = torch.tensor(logits)
        for warper in warpers:
            scores = warper(None, scores)
        kept = scores[0].numpy()
        for seed in range(12):
            wanted = max(
                np.flatnonzero(np.isfinite(kept)), key=lambda i: kept[i] + noise(seed, 3, int(i))
            )
            options = [np.array([x], d) for x, d in ((0.7, "f4"), (k, "i4"), (p, "f4"), (m, "f4"))]
            assert run(ops.sample, logits, ints(3), ints(seed), *options).tolist() == [wanted]


# --- what does not fit ------------------------------------------------------------------------


def types(text: str) -> list[TensorType]:
    """``float[B, 3] i32[]`` as types."""
    found = re.findall(r"(\w+)\[([^]]*)\]", text)
    return [
        TensorType(
            DType(dtype),
            tuple(int(d) if d.isdecimal() else d for d in shape.replace(" ", "").split(",") if d),
        )
        for dtype, shape in found
    ]


ROPE = "float[B, S, 2, 8] f32[B, S, 4]"
QKV = "float[B, S, 6, 8] float[B, T, 2, 8] float[B, T, 2, 8] i32[B, S]"
OPTIONS_OK = "f32[B, 9] i32[B] i32[B] f32[B] i32[B] f32[B] f32[B]"

BREAKS: list[tuple[Body, str, dict[str, Any], str]] = [
    (ops.linear, "float[B, 3] float[3]", {}, "the weight is float[3], not [N, K]"),
    (ops.linear, "float[B, 3] float[5, 4]", {}, "the input's last size is 3, the weight's 4"),
    (ops.linear, "float[] float[5, 4]", {}, "takes at least one axis"),
    (ops.linear, "float[4] float[5, 4]", {}, "takes at least two axes"),
    (ops.linear, "float[B, 4] float[5, 4] float[4]", {}, "the bias is float[4], not [5]"),
    (ops.linear, "f32[B, 4] float[5, 4]", {}, "dtypes f32 and float differ"),
    (ops.embedding, "i32[B] float[5]", {}, "the weight is float[5], not [V, D]"),
    (ops.embedding, "i64[B] float[5, 4]", {}, "takes i32 indices, not i64"),
    (ops.rms_norm, "float[B, 4] float[5]", {"eps": 1.0}, "the scale is float[5], not [4]"),
    (ops.rms_norm, "float[] float[]", {"eps": 1.0}, "takes at least one axis"),
    (ops.rms_norm, "i32[B, 4] float[4]", {"eps": 1.0}, "takes a float dtype, not i32"),
    (ops.rms_norm, "float[B, S] float[S]", {"eps": 1.0}, "must be of fixed size, not S"),
    (ops.layer_norm, "float[4] float[4] float[1]", {"eps": 1.0}, "the bias is float[1], not [4]"),
    (ops.layer_norm, "float[4] float[3]", {"eps": 1.0}, "the scale is float[3], not [4]"),
    (ops.softmax, "bool[B, 4]", {}, "takes a float dtype, not bool"),
    (ops.softmax, "float[]", {}, "axis -1 is outside a rank of 0"),
    (ops.sigmoid, "i32[B]", {}, "0.5 is not a value of i32"),
    (ops.silu, "i32[B]", {}, "0.5 is not a value of i32"),
    (ops.swiglu, "float[B, 4] float[B, 5]", {}, "gate float[B, 4] and up float[B, 5] differ"),
    (ops.rope_table, "f32[B, S]", {"frequencies": (1.0,)}, "positions are f32, not i32"),
    (ops.rope, f"{ROPE} f32[B, S, 3]", {}, "tables f32[B, S, 4] and f32[B, S, 3] do not fit"),
    (ops.rope, "float[B, S, 8] f32[B, S, 4] f32[B, S, 4]", {}, "takes [B, S, H, D], not float"),
    (ops.rope, "float[B, S, 2, 8] f32[] f32[]", {}, "takes at least one axis"),
    (
        ops.rope,
        "float[B, S, 2, 8] f32[B, S, 5] f32[B, S, 5]",
        {},
        "tables of 5 rotate 10 of only 8 dimensions",
    ),
    (ops.rope, "float[B, S, 2, D] f32[B, S, 4] f32[B, S, 4]", {}, "must be of fixed size"),
    (
        ops.attention,
        QKV.replace("2, 8] i32", "8] i32"),
        {"scale": 1.0},
        "takes [B, S, H, D], not float[B, T, 8]",
    ),
    (
        ops.attention,
        QKV.replace("[B, T, 2, 8] float", "[B, T, 2, 4] float"),
        {"scale": 1.0},
        "keys float[B, T, 2, 4] do not fit queries float[B, S, 6, 8] and values",
    ),
    (ops.attention, QKV.replace("T, 2", "T, 4"), {"scale": 1.0}, "6 heads do not share 4 key"),
    (ops.attention, QKV.replace("S, 6", "S, H"), {"scale": 1.0}, "number of heads must be fixed"),
    (ops.attention, QKV.replace("i32[B, S]", "i32[S]"), {"scale": 1.0}, "not i32[B, S]"),
    (ops.attention, QKV, {"scale": 1.0, "window": 0}, "the window is 0, not positive"),
    (ops.gumbel, "i32[B] i32[B, 1]", {"vocab": 3}, "not i32[B] both"),
    (ops.gumbel, "i32[] i32[]", {"vocab": 3}, "not i32[B] both"),
    (ops.gumbel, "f32[B] f32[B]", {"vocab": 3}, "not i32[B] both"),
    (ops.greedy, "f32[]", {}, "axis -1 is outside a rank of 0"),
    (ops.sample, OPTIONS_OK.replace("B, 9", "9"), {}, "takes logits [B, V], not f32[9]"),
    (ops.sample, OPTIONS_OK.replace("9", "V"), {}, "the vocabulary must be of fixed size"),
    (ops.sample, OPTIONS_OK.replace("9", "3000000000"), {}, "not a value of i32"),
    (
        ops.sample,
        OPTIONS_OK.replace("i32[B] f32[B] i32[B]", "i32[B] i32[B] i32[B]"),
        {},
        "temperature is i32[B], not f32[B]",
    ),
    (ops.gelu, "float[B]", {}, "missing a required argument: 'tanh'"),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "complaint"), BREAKS)
def test_a_composite_says_what_is_wrong(
    op: Body, inputs: str, attrs: dict[str, Any], complaint: str
) -> None:
    name = op.__name__
    with pytest.raises(SpecError, match=re.escape(complaint)) as caught:
        program(lambda *x: op(*x, **attrs), types(inputs))
    assert str(caught.value).startswith(f"Test: {name}({', '.join(map(str, types(inputs)))}): ")


def test_every_composite_has_a_case() -> None:
    assert {op.__name__ for op, *_ in BREAKS} == set(ops.COMPOSITES)
