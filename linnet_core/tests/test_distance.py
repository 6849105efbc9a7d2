"""Distances: numbers worked out by hand, and what must hold for any logits."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from linnet import distance
from linnet.distance import compare, compare_logprobs, compare_tokens
from linnet.errors import ComparisonError

LN2, LN3 = math.log(2), math.log(3)


def f32(*values: object) -> np.ndarray:
    return np.array(values, np.float32)


def test_by_hand() -> None:
    """Two positions over two tokens: (1/2, 1/2) against (1/4, 3/4), then equal."""
    reference = f32([0, 0], [0, 5])
    other = f32([0, LN3], [0, 5])
    d = compare(reference, other)
    at_first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert d.kl_max == pytest.approx(at_first, abs=1e-7)
    assert d.kl == pytest.approx(at_first / 2, abs=1e-7)
    assert d.max_abs == pytest.approx(LN3, abs=1e-6)
    assert d.mean_abs == pytest.approx(LN3 / 4, abs=1e-6)
    assert (d.max_abs_at.row, d.max_abs_at.position, d.max_abs_at.token) == ((), 0, 1)
    assert d.positions == 2 and d.non_finite == 0


def test_kl_is_of_the_other_from_the_reference() -> None:
    """KL(ref || other) with ref (2/3, 1/3), other (1/3, 2/3): ln 2 / 3; it is not symmetric."""
    assert compare(f32([LN2, 0]), f32([0, LN2])).kl == pytest.approx(LN2 / 3, abs=1e-7)
    skewed = compare(f32([LN3, 0]), f32([0, 0])).kl  # (3/4, 1/4) from (1/2, 1/2)
    assert skewed == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)


def test_kl_of_huge_logits_is_finite() -> None:
    d = compare(f32([1e30, 0, -1e30]), f32([1e30, 0, -1e30]))
    assert d.kl == 0.0
    assert compare(f32([3e38, -3e38]), f32([-3e38, 3e38])).kl == pytest.approx(6e38, rel=1e-6)


def test_top1_by_band() -> None:
    """1,030 positions; wrong at 15, at 16, at 300 and at every one from 1024 on."""
    reference = np.zeros((1030, 3), np.float32)
    reference[:, 1] = 1
    other = reference.copy()
    other[[15, 16, 300, *range(1024, 1030)], 2] = 2
    d = compare(reference, other)
    assert [(b.name, b.positions, b.agreed) for b in d.bands] == [
        ("0-15", 16, 15),
        ("16-63", 48, 47),
        ("64-255", 192, 192),
        ("256-1023", 768, 767),
        ("1024+", 6, 0),
    ]
    assert d.top1 == (1030 - 9) / 1030
    assert d.first_divergence == (15,)


def test_ragged_rows() -> None:
    """Lengths 1, 7 and 19: what lies beyond a row's length does not count, whatever it is."""
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((3, 19, 11)).astype(np.float32)
    other = reference.copy()
    lengths = np.array([1, 7, 19], np.int32)
    for row, length in enumerate(lengths):
        other[row, length:] = np.nan
        reference[row, length:] = np.inf
    other[2, 17] = -reference[2, 17]
    d = compare(reference, other, lengths=lengths)
    assert d.positions == 27 and d.non_finite == 0
    assert d.first_divergence == (None, None, 17)
    assert d.max_abs_at.row == (2,) and d.max_abs_at.position == 17
    assert [(b.name, b.positions) for b in d.bands] == [("0-15", 24), ("16-63", 3)]


def test_any_leading_shape() -> None:
    reference = np.random.default_rng(1).standard_normal((2, 3, 5, 7))
    other = reference.copy()
    other[1, 2, 4] *= -1
    d = compare(reference, other)
    assert d.positions == 30
    assert d.first_divergence == (None, None, None, None, None, 4)
    assert d.max_abs_at.row == (1, 2)


def test_positions_of_a_sparse_comparison() -> None:
    """Logits of positions 3, 70 and 900 alone are told in these terms."""
    reference = np.eye(3, dtype=np.float32)
    other = reference[:, [0, 2, 1]]
    d = compare(reference, other, positions=np.array([3, 70, 900]))
    assert [(b.name, b.agreed) for b in d.bands] == [("0-15", 1), ("64-255", 0), ("256-1023", 0)]
    assert d.first_divergence == (70,) and d.max_abs_at.position == 70


def test_ties() -> None:
    tied, low, high = f32([2, 2, 0]), f32([3, 2, 0]), f32([2, 3, 0])
    assert compare(tied, low).top1 == compare(tied, high).top1 == 1
    assert compare(tied, f32([0, 0, 1])).top1 == 0
    # A tie of the other is broken as greedy choice breaks it: the lowest id.
    assert compare(low, tied).top1 == 1
    assert compare(high, tied).top1 == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    reference = f32([1, 0], [0, 1], [1, 0])
    other = reference.copy()
    other[1, 0] = bad
    d = compare(reference, other)
    assert d.non_finite == 1
    assert not d.within(1e-3) and not d.within(math.inf)
    assert d.max_abs == d.mean_abs == d.kl == d.kl_max == math.inf
    assert (d.max_abs_at.position, d.max_abs_at.token) == (1, 0)
    assert d.top1 == 2 / 3 and d.first_divergence == (1,)
    told = json.loads(json.dumps(d.to_json(), allow_nan=False))
    assert told["max_abs"] is None and told["kl"] is None and told["non_finite"] == 1


def test_bounds() -> None:
    d = compare(f32([0, 1]), f32([0, 1.5]))
    assert d.within(0.5) and not d.within(0.49) and not d.within(math.nan)
    assert compare(f32([0, 1]), f32([0, 1])).within(0)


def test_json() -> None:
    told = json.loads(json.dumps(compare(f32([[0, 1]]), f32([[1, 0]])).to_json()))
    assert told["bands"] == [
        {"start": 0, "stop": 16, "positions": 1, "agreed": 0, "name": "0-15", "top1": 0.0}
    ]
    assert told["max_abs_at"] == {"row": [0], "position": 0, "token": 0}
    assert told["first_divergence"] == [0]
    assert (told["positions"], told["max_abs"], told["mean_abs"]) == (1, 1.0, 1.0)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    reference = rng.standard_normal((3, 19, 13)).astype(np.float32)
    other = reference + rng.standard_normal(reference.shape).astype(np.float32)
    whole = compare(reference, other)
    monkeypatch.setattr(distance, "_CHUNK", 30)
    pieces = compare(reference, other)
    assert pieces.kl == pytest.approx(whole.kl)
    for field in ("max_abs", "max_abs_at", "top1", "bands", "first_divergence", "kl_max"):
        assert getattr(pieces, field) == getattr(whole, field)


@pytest.mark.parametrize(
    ("reference", "other", "options", "message"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), {}, r"\[2, 3\], the other's \[3, 2\]"),
        (np.zeros(3), np.zeros(3), {}, r"\[\.\.\., positions, vocab\]"),
        (np.zeros((2, 0)), np.zeros((2, 0)), {}, "at least one"),
        (np.zeros((2, 3), int), np.zeros((2, 3)), {}, "reference's logits are int64"),
        (np.zeros((2, 3)), np.zeros((2, 3), np.float16), {}, "other's logits are float16"),
        (f32([0, math.nan]), f32([0, 0]), {}, "the reference has 1 logits that are not finite"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), {"lengths": np.array([4, 1])}, "from 1 to 4"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), {"lengths": np.array([1])}, "one for each row"),
        (np.zeros((1, 3, 4)), np.zeros((1, 3, 4)), {"lengths": np.array([0])}, "no positions"),
        (np.zeros((2, 3)), np.zeros((2, 3)), {"positions": np.array([1, 1])}, "ascending"),
    ],
)
def test_what_cannot_be_compared(reference, other, options, message) -> None:
    with pytest.raises(ComparisonError, match=message):
        compare(reference, other, **options)


def test_tokens() -> None:
    d = compare_tokens([[1, 2, 3], [4, 5], [6]], [[1, 9, 3], [4, 5], [6, 7]])
    assert d.tokens == 7 and d.agreement == 5 / 7
    assert d.first_divergence == (1, None, 1)
    assert json.loads(json.dumps(d.to_json()))["first_divergence"] == [1, None, 1]


def test_tokens_that_cannot_be_compared() -> None:
    with pytest.raises(ComparisonError, match="1 rows of tokens, the other 2"):
        compare_tokens([[1]], [[1], [2]])
    with pytest.raises(ComparisonError, match="no tokens"):
        compare_tokens([[]], [[]])


logits = arrays(np.float32, (2, 5, 4), elements=st.floats(-50, 50, width=32))
# Small integers: adding one to another is exact, so that no tie comes or goes.
whole_logits = arrays(np.float32, (2, 5, 4), elements=st.integers(-50, 50))


@given(logits)
def test_identity_is_zero(x) -> None:
    d = compare(x, x.copy())
    assert d.max_abs == d.mean_abs == d.kl == d.kl_max == 0 and d.top1 == 1
    assert d.first_divergence == (None, None) and d.within(0)


@given(logits, logits)
def test_measures_are_ordered(x, y) -> None:
    d = compare(x, y)
    assert 0 <= d.mean_abs <= d.max_abs and 0 <= d.kl <= d.kl_max
    assert d.max_abs == np.abs(x.astype(float) - y.astype(float)).max()
    assert d.top1 * d.positions == sum(band.agreed for band in d.bands)
    assert (d.first_divergence == (None, None)) == (d.top1 == 1)


@given(whole_logits, whole_logits, arrays(np.float32, (2, 5, 1), elements=st.integers(-99, 99)))
def test_a_constant_for_each_row_changes_no_distribution(x, y, c) -> None:
    d, shifted = compare(x, y), compare(x, y + c)
    assert shifted.kl == pytest.approx(d.kl, abs=1e-9)
    assert shifted.top1 == d.top1 and shifted.bands == d.bands


@given(
    logits,
    st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 3)),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.floats(min_value=0),
)
def test_no_bound_holds_for_what_is_not_finite(x, where, bad, bound) -> None:
    y = x.copy()
    y[where] = bad
    assert not compare(x, y).within(bound)


def listed(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :count]
    return ids, np.take_along_axis(logprobs, ids, axis=-1)


def test_logprobs_of_every_token_say_what_logits_do() -> None:
    draw = np.random.default_rng(4)
    reference = draw.standard_normal((20, 33)).astype(np.float32)
    other = (reference + 0.1 * draw.standard_normal((20, 33))).astype(np.float32)
    full = compare(reference, other)
    found = compare_logprobs(reference, *listed(other, 33))
    assert found.kl == pytest.approx(full.kl, rel=1e-6)
    assert found.kl_max == pytest.approx(full.kl_max, rel=1e-6)
    assert found.top1 == full.top1
    assert found.first_divergence == full.first_divergence[0]
    some = compare_logprobs(reference, *listed(other, 10))
    assert 0 < some.kl <= full.kl and (some.listed, some.vocab) == (10, 33)


def test_logprobs_that_are_the_same_are_no_distance() -> None:
    reference = np.random.default_rng(4).standard_normal((5, 9))
    found = compare_logprobs(reference, *listed(reference, 3))
    assert (found.top1, found.first_divergence) == (1.0, None)
    assert found.kl == pytest.approx(0, abs=1e-12) and found.max_abs == pytest.approx(0, abs=1e-12)


def test_logprobs_that_are_none_are_refused() -> None:
    reference = np.random.default_rng(4).standard_normal((5, 9))
    ids, logprobs = listed(reference, 3)
    twice, high, infinite = ids.copy(), ids.copy(), logprobs.copy()
    twice[2, 1], high[0, 0], infinite[1, 1] = twice[2, 0], 9, -np.inf
    for arguments, message in (
        ((reference[:4], ids, logprobs), "listed for 4 positions"),
        ((reference, twice, logprobs), "twice"),
        ((reference, high, logprobs), "that is none"),
        ((reference, ids, infinite), "that is none"),
        ((reference * np.nan, ids, logprobs), "not finite"),
    ):
        with pytest.raises(ComparisonError, match=message):
            compare_logprobs(*arguments)
