"""How sure a ratio of two medians is.

A median's interval is distribution-free: of n sorted runs, the k-th from either end enclose the
true median with a probability that follows from the binomial distribution alone. k is the largest
for which that is 97.5 %, so that a ratio of two is enclosed in 95 %. Five or six runs cannot
give that; they give all that they have, from the least to the most, and the lower confidence is
stated. Fewer are no better than a coin there: the whole spread is added at both ends, whose
confidence is that of a normal distribution. A process that is started again gives other medians
than its runs, which agree among themselves, suggest: every end is taken ``RESTART`` further out.
"""

import math
from dataclasses import dataclass

from linnet.bench.schema import Metric

RESTART = 0.015
"""Relative; medians of a process that is started anew differ by this much."""
LEVEL = 0.975
"""Of each median; both hold together in 95 %."""
FEW = {2: 0.79, 3: 0.96, 4: 0.99}
"""How often so many normal values enclose their median, with their spread added at both ends."""


@dataclass(frozen=True)
class Interval:
    """Where a median lies; ``confidence`` is None where no spread of runs was there to tell."""

    low: float
    high: float
    confidence: float | None


@dataclass(frozen=True)
class Ratio:
    """How many times the peer's speed a row has. ``confidence`` as in ``Interval``."""

    value: float
    low: float
    high: float
    confidence: float | None

    @property
    def caveat(self) -> str:
        """What the interval is short of, where it is not of 95 %."""
        if self.confidence is None:
            return "without a spread of runs"
        return "" if self.confidence >= 2 * LEVEL - 1 else f"{self.confidence:.0%} confidence"

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``the same speed`` where the interval allows for it."""
        if self.low <= 1 <= self.high:
            return "the same speed"
        return "faster" if self.low > 1 else "slower"


def median_interval(metric: Metric) -> Interval:
    """Where the true median of a metric lies, as far as its runs tell."""
    low, high, confidence = metric.median, metric.median, None
    if metric.low is not None and metric.high is not None and metric.n > 1:
        depth = max(1, _depth(metric.n)) if metric.values else 1
        confidence = 1 - 2 * _tail(metric.n, depth)
        runs = sorted(metric.values) or [metric.low, metric.high]
        low, high = runs[depth - 1], runs[-depth]
        if metric.n in FEW:
            spread, confidence = high - low, FEW[metric.n]
            low, high = max(0.0, low - spread), high + spread
    return Interval(low * (1 - RESTART), high * (1 + RESTART), confidence)


def ratio(ours: Metric, theirs: Metric) -> Ratio | None:
    """How many times as high one is as the other; None where there is nothing to divide by."""
    if not ours.median or not theirs.median:
        return None
    a, b = median_interval(ours), median_interval(theirs)
    confidence = None
    if a.confidence is not None and b.confidence is not None:
        confidence = max(0.0, a.confidence + b.confidence - 1)
    high = a.high / b.low if b.low else math.inf
    return Ratio(ours.median / theirs.median, a.low / b.high, high, confidence)


def _tail(n: int, depth: int) -> float:
    """Probability that fewer than ``depth`` of ``n`` runs are below the true median."""
    return sum(math.comb(n, k) for k in range(depth)) * 0.5**n


def _depth(n: int) -> int:
    """The most that can be left out at each end while ``LEVEL`` holds; 0 where it cannot."""
    depth = 0
    while 2 * depth < n and 1 - 2 * _tail(n, depth + 1) >= LEVEL:
        depth += 1
    return depth
