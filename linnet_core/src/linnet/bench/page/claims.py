"""The claims of a page: Linnet beside what it replaces, each computed from the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from linnet.bench.page.catalogue import CONTESTS, Contest
from linnet.bench.page.figures import per_cent, times
from linnet.bench.page.intervals import Ratio, ratio
from linnet.bench.page.rows import PageRow, fastest
from linnet.bench.schema import Metric


@dataclass(frozen=True)
class Duel:
    """Two rows in one dtype: ours, and the fastest of what it replaces."""

    ours: PageRow
    theirs: PageRow
    metric: str
    ratio: Ratio

    @property
    def bars(self) -> tuple[tuple[PageRow, Metric, float], ...]:
        """Both, with their values and their shares of the longer one."""
        both = [(row, row.metric(self.metric)) for row in (self.ours, self.theirs)]
        measured = [(row, metric) for row, metric in both if metric]
        longest = max(metric.median for _, metric in measured)
        return tuple((row, metric, metric.median / longest) for row, metric in measured)

    @property
    def uncompared(self) -> list[str]:
        """The names of those whose output nothing was compared with."""
        return [row.title for row in (self.ours, self.theirs) if row.standing == "uncompared"]


@dataclass(frozen=True)
class Claim:
    """What a page says of one contest; its headline is the duel with the highest ratio."""

    contest: Contest
    duels: tuple[Duel, ...]

    @property
    def headline(self) -> Duel:
        """The duel whose ratio stands in large."""
        return max(self.duels, key=lambda duel: duel.ratio.value)

    def amount(self, duel: Duel) -> str:
        """A duel's ratio, as a factor or, in contests of small differences, in per cent."""
        return (per_cent if self.contest.small else times)(duel.ratio.value)

    def range(self, duel: Duel) -> str:
        """The ends of its interval, in the same form."""
        form = per_cent if self.contest.small else times
        return f"{form(duel.ratio.low)} to {form(duel.ratio.high)}"

    @property
    def tally(self) -> str:
        """Of several duels, how many went which way: ``1 faster, 2 the same speed``."""
        verdicts = [duel.ratio.verdict for duel in self.duels]
        found = [(verdicts.count(v), v) for v in ("faster", "the same speed", "slower")]
        return ", ".join(f"{number} {verdict}" for number, verdict in found if number)


def page_claims(rows: Sequence[PageRow]) -> list[Claim]:
    """Every contest that has both its sides, in every dtype in which it has them."""
    claims = []
    dtypes = dict.fromkeys(row.dtype for row in rows if row.dtype)
    for contest in CONTESTS:
        duels = [
            duel
            for ours, theirs in contest.pairs
            for dtype in dtypes
            if (duel := _duel([r for r in rows if r.dtype == dtype], ours, theirs, contest.metric))
        ]
        if duels:
            claims.append(Claim(contest, tuple(duels)))
    return claims


def _duel(
    rows: Sequence[PageRow], ours: Sequence[str], theirs: Sequence[str], metric: str
) -> Duel | None:
    one = fastest((row for row in rows if row.key in ours), metric)
    other = fastest((row for row in rows if row.key in theirs), metric)
    if one is None or other is None:
        return None
    a, b = one.metric(metric), other.metric(metric)
    found = ratio(a, b) if a and b else None
    return Duel(one, other, metric, found) if found else None
