"""Numbers as a page writes them, and how sure a ratio is."""

import math
import random
import statistics

import pytest

from linnet.bench.page import figures
from linnet.bench.page.intervals import RESTART, Ratio, median_interval, ratio
from linnet.bench.schema import Metric


def metric(*values: float, kept: bool = True) -> Metric:
    return Metric(
        statistics.median(values), min(values), max(values), len(values), values if kept else ()
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000012345, "1.2e-05"),
        (0.0938, "0.0938"),
        (0.102, "0.102"),
        (0.3, "0.30"),
        (0.97, "0.97"),
        (1, "1.00"),
        (9.694, "9.69"),
        (9.999, "10.0"),
        (63.96, "64.0"),
        (99.97, "100"),
        (12046.4, "12,046"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert figures.digits(value) == text


def test_units() -> None:
    assert figures.shown("peak_bytes", 4 * 2**30) == "4.00 GiB"
    assert figures.shown("share_of_limit", 0.613) == "61.3%"
    assert figures.shown("ttft_ms", 8.5) == "8.50 ms"
    assert figures.per_cent(0.991) == "−0.9%"
    assert figures.times(0.638) == "0.64×"
    assert figures.size(1711376384) == "1.7B"
    assert figures.size(134515008) == "135M"


@pytest.mark.parametrize("largest", [1e-6, 0.31, 0.97, 1, 23.5, 585, 12997, 5e17])
def test_ticks_are_round_and_cover(largest: float) -> None:
    ticks = figures.ticks(largest)
    assert ticks[0] == 0
    assert ticks[-2] < largest <= ticks[-1] * (1 + 1e-9)
    assert 3 <= len(ticks) <= 7
    step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
    assert any(step == pytest.approx(round_) for round_ in (1, 2, 2.5, 5))


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    """Drawn 2,000 times with a fixed seed from a skewed distribution whose median is 1."""
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        runs = [math.exp(draw.gauss(0, 0.5)) for _ in range(10)]
        found = median_interval(metric(*runs))
        assert found.confidence == pytest.approx(0.978515625)
        hits += found.low / (1 - RESTART) <= 1 <= found.high / (1 + RESTART)
    assert hits / 2000 == pytest.approx(0.9785, abs=0.01)


def test_ten_runs_leave_out_one_at_each_end() -> None:
    found = median_interval(metric(*range(1, 11)))
    assert (found.low, found.high) == (2 * (1 - RESTART), 9 * (1 + RESTART))


def test_without_the_values_the_ends_are_taken() -> None:
    found = median_interval(metric(*range(1, 11), kept=False))
    assert (found.low, found.high) == (1 - RESTART, 10 * (1 + RESTART))
    assert found.confidence == pytest.approx(1 - 2 / 2**10)


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_few_runs_of_a_normal_distribution_hold_the_median_as_often(runs: int) -> None:
    draw = random.Random(0)
    found = [median_interval(metric(*(draw.gauss(9, 1) for _ in range(runs)))) for _ in range(4000)]
    hits = sum(f.low / (1 - RESTART) <= 9 <= f.high / (1 + RESTART) for f in found)
    assert found[0].confidence is not None
    assert hits / 4000 == pytest.approx(found[0].confidence, abs=0.015)


def test_few_runs_say_how_little_they_know() -> None:
    three = median_interval(metric(5, 6, 7))
    assert (three.low, three.high) == (3 * (1 - RESTART), 9 * (1 + RESTART))
    assert median_interval(metric(1, 9)).low == 0
    five = median_interval(metric(1, 2, 3, 4, 5))
    assert (five.low, five.high) == (1 - RESTART, 5 * (1 + RESTART))
    assert five.confidence == pytest.approx(1 - 2 / 2**5)
    assert median_interval(metric(2.0)).confidence is None
    unknown = median_interval(Metric(2.0, None, None, 10))
    assert (unknown.low, unknown.high) == (2 * (1 - RESTART), 2 * (1 + RESTART))
    assert unknown.confidence is None


def test_a_ratio_is_enclosed_in_ninety_five_per_cent() -> None:
    found = ratio(metric(*range(101, 111)), metric(*range(51, 61)))
    assert found is not None
    assert found.value == pytest.approx(105.5 / 55.5)
    assert found.confidence is not None
    assert found.confidence >= 0.95
    assert found.low < found.value < found.high
    assert found.caveat == ""


def test_a_ratio_says_what_its_interval_is_short_of() -> None:
    three = ratio(metric(1, 2, 3), metric(1, 2, 3))
    one = ratio(metric(1), metric(1, 2, 3))
    assert three is not None
    assert one is not None
    assert three.caveat == "92% confidence"
    assert one.caveat == "without a spread of runs"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.01, 1.2, "faster"), (0.99, 1.2, "the same speed"), (0.8, 0.99, "slower")],
)
def test_verdicts(low: float, high: float, verdict: str) -> None:
    assert Ratio(1.1, low, high, None).verdict == verdict
