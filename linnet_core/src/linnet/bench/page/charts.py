"""The charts of a page: bars with their lengths, what is best, and what is not there and why."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from linnet.bench.page.figures import SCALES, UNITS, mark, shown, span, ticks
from linnet.bench.page.rows import PageRow, names
from linnet.bench.schema import Metric

CUT = 5.0
"""A bar this many times as long as the next is cut, so that the others can be told apart."""


@dataclass(frozen=True)
class Quantity:
    """What a chart is of. ``workloads`` has True for rows of many requests, False for one."""

    name: str
    title: str
    better: str
    workloads: frozenset[bool]
    about: str
    logarithmic: bool = False

    @property
    def direction(self) -> str:
        """How to read it."""
        return f"{WORDS[UNITS[self.name]]}, {self.better} is better" if self.better else ""


WORDS = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "tok/s": "Tokens per second",
    "GiB": "GiB",
    "%": "Per cent",
}
ONE, MANY = frozenset({False}), frozenset({True})
QUANTITIES = (
    Quantity(
        "ttft_ms",
        "Time to first token",
        "lower",
        ONE,
        "From the prompt's token ids to the first new id, one request at a time.",
    ),
    Quantity(
        "decode_tok_s",
        "Decode speed",
        "higher",
        ONE,
        "Tokens per second after the first, one request at a time.",
    ),
    Quantity(
        "serve_tok_s",
        "Serving throughput",
        "higher",
        MANY,
        "New tokens per second of all requests together.",
    ),
    Quantity(
        "serve_ttft_ms",
        "Serving time to first token",
        "lower",
        MANY,
        "The median request's wait for its first token, queueing included.",
    ),
    Quantity(
        "load_s",
        "Load time",
        "lower",
        ONE | MANY,
        "From nothing imported to ready for the first prompt.",
    ),
    Quantity(
        "peak_bytes", "Peak memory", "lower", ONE | MANY, "The most that was held at any moment."
    ),
    Quantity(
        "share_of_limit",
        "Share of the bandwidth limit",
        "higher",
        ONE,
        "Decode speed, of what reading the weights and the cache once for each token would allow.",
    ),
    Quantity(
        "distance",
        "Distance from the reference",
        "",
        ONE | MANY,
        "The largest difference from the reference's output on the same input. A row beyond its "
        "upright line, which is what its dtype is allowed, is wrong. Each step of the scale is ten "
        "times the one before.",
        logarithmic=True,
    ),
)


@dataclass(frozen=True)
class Bar:
    """A row's value. ``length``, ``low`` and ``high`` are shares of the axis, 0 to 1."""

    row: PageRow
    metric: Metric
    text: str
    spread: str
    length: float
    low: float
    high: float
    limit: float | None = None
    """The place of what its dtype is allowed."""
    cut: bool = False
    best: bool = False


@dataclass(frozen=True)
class Absent:
    """Rows without a bar, for one reason."""

    rows: list[PageRow]
    reason: str

    @property
    def names(self) -> str:
        """Which they are."""
        return names(self.rows)


@dataclass(frozen=True)
class Chart:
    """One quantity of every row that has it. ``marks`` are places of the axis with their words."""

    quantity: Quantity
    groups: list[tuple[str, list[Bar]]]
    marks: list[tuple[float, str]]
    absent: list[Absent] = field(default_factory=list)
    settings: str = ""
    """Rows whose memory is a setting rather than a need: not drawn."""
    silent: str = ""
    """Rows that ran and do not measure this."""

    @property
    def bars(self) -> list[Bar]:
        """All of them, from top to bottom."""
        return [bar for _, bars in self.groups for bar in bars]

    @property
    def best(self) -> list[Bar]:
        """Those that are accented."""
        return [bar for bar in self.bars if bar.best]


def page_charts(rows: Sequence[PageRow]) -> list[Chart]:
    """A chart for each quantity that a row has."""
    return [chart for quantity in QUANTITIES if (chart := _chart(quantity, rows)).groups]


def _chart(quantity: Quantity, rows: Sequence[PageRow]) -> Chart:
    name = quantity.name
    rows = [row for row in rows if row.serving in quantity.workloads]
    measured = [(row, metric) for row in rows if (metric := row.metric(name))]
    drawn = [(row, metric) for row, metric in measured if metric.memory != "reserved"]
    place, marks, longest = _axis(quantity, [metric for _, metric in drawn])
    best = _best(quantity, drawn)
    groups: dict[str, list[Bar]] = {}
    for row, metric in drawn:
        ends = (metric.low, metric.high)
        low, high = (metric.median if end is None else end for end in ends)
        varied = metric.n > 1 and metric.low is not None
        bar = Bar(
            row,
            metric,
            shown(name, metric.median),
            span(name, low, high) if varied else "",
            place(metric.median),
            place(low),
            place(high),
            place(row.limit) if quantity.logarithmic and row.limit else None,
            cut=metric.median > longest,
            best=row in best,
        )
        groups.setdefault(row.group, []).append(bar)
    failed: dict[str, list[PageRow]] = {}
    for row in rows:
        if row.standing == "failed":
            failed.setdefault(row.why, []).append(row)
    return Chart(
        quantity,
        list(groups.items()),
        marks,
        [Absent(its, reason) for reason, its in failed.items()],
        names(row for row, metric in measured if metric.memory == "reserved"),
        names(row for row in rows if row.standing != "failed" and not row.metric(name)),
    )


def _axis(
    quantity: Quantity, metrics: Sequence[Metric]
) -> tuple["Axis", list[tuple[float, str]], float]:
    """Where values stand, the marks, and the largest value that is drawn whole."""
    scale = SCALES.get(quantity.name, 1.0)
    if quantity.logarithmic:
        above = [metric.median for metric in metrics if metric.median > 0]
        low = math.floor(math.log10(min(above))) if above else 0
        high = max(low + 1, math.ceil(math.log10(max(above)))) if above else 1
        axis = Axis(10.0**high, low)
        return axis, [(axis(10.0**p), mark(10.0**p)) for p in range(low, high + 1)], axis.most
    ends = sorted(metric.median for metric in metrics)
    longest = max((metric.high or metric.median for metric in metrics), default=0.0)
    if len(ends) > 2 and ends[-1] > CUT * ends[-2]:
        longest = max(
            metric.high or metric.median for metric in metrics if metric.median < ends[-1]
        )
    found = ticks(longest * scale)
    axis = Axis(found[-1] / scale)
    return axis, [(axis(tick / scale), mark(tick)) for tick in found], axis.most


@dataclass(frozen=True)
class Axis:
    """From values to shares of the width; logarithmic from ``10 ** decade`` where one is given."""

    most: float
    decade: int | None = None

    def __call__(self, value: float) -> float:
        """The place of a value, 0 to 1."""
        if self.decade is None:
            return min(1.0, value / self.most)
        if value <= 0:
            return 0.0
        share = (math.log10(value) - self.decade) / (math.log10(self.most) - self.decade)
        return min(1.0, max(0.0, share))


def _best(quantity: Quantity, drawn: Sequence[tuple[PageRow, Metric]]) -> list[PageRow]:
    """The best of each workload; equals are best together.

    A row that is wrong never is. One that was not compared is best only of a workload in which
    none was.
    """
    found: list[PageRow] = []
    for workload in quantity.workloads if quantity.better else ():
        these = [(row, metric) for row, metric in drawn if row.serving is workload]
        right = [(row, metric) for row, metric in these if row.standing == "right"]
        able = right or [(row, metric) for row, metric in these if row.standing == "uncompared"]
        if able:
            pick = min if quantity.better == "lower" else max
            value = pick(metric.median for _, metric in able)
            found += [row for row, metric in able if metric.median == value]
    return found
