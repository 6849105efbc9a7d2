"""The rows of a page: measured or missing, in order, with what each is worth."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from linnet.bench.page.catalogue import GROUPS, KNOWN, PLACE, SERVING, Side, bound_of
from linnet.bench.page.figures import digits
from linnet.bench.page.intervals import Ratio, ratio
from linnet.bench.schema import Metric, Results, Row

Standing = Literal["right", "uncompared", "wrong", "failed"]
"""Within its bound; nothing to compare; beyond its bound or without one; not measured."""

MISSING = (
    "there is no row of it in the results: it was not asked for, or no installed plugin measures it"
)
PAIR_METRICS = {True: "serve_tok_s", False: "decode_tok_s"}


@dataclass(frozen=True)
class PageRow:
    """A row with its place, its standing and its ratio to what it replaces."""

    key: str
    dtype: str
    """Empty for a row that is not in the results."""
    title: str
    group: str
    side: Side
    standing: Standing
    why: str
    """What its standing means for this row, in a sentence."""
    row: Row | None
    limit: float | None = None
    """The largest difference that its dtype is allowed, where that is what its bound is of."""
    peer: str = ""
    ratio: Ratio | None = None

    @property
    def anchor(self) -> str:
        """Its place in links; neither part has a colon."""
        return f"{self.key}:{self.dtype}" if self.dtype else self.key

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return f"{self.title} in {self.dtype}" if self.dtype else self.title

    @property
    def serving(self) -> bool:
        """Whether it is of many requests: such rows are ranked among themselves."""
        if self.key in KNOWN:
            return self.group == SERVING
        return self.metric("serve_tok_s") is not None or self.metric("serve_ttft_ms") is not None

    def metric(self, name: str) -> Metric | None:
        """One of its metrics; its share of the limit and its distance among them."""
        if self.row is None:
            return None
        if name == "share_of_limit":
            return _one(self.row.share_of_limit)
        if name == "distance":
            return _one(self.row.distance.max_abs if self.row.distance else None)
        return self.row.metrics.get(name)


def _one(value: float | None) -> Metric | None:
    return None if value is None else Metric(value, value, value, 1)


def page_rows(results: Results) -> list[PageRow]:
    """Every row, grouped and in order; those that the page knows and the results lack included."""
    present = {row.key for row in results.rows}
    found = [_measured(row, results) for row in results.rows]
    found += [
        PageRow(known.key, "", known.title, known.group, known.side, "failed", MISSING, None)
        for known in KNOWN.values()
        if known.key not in present
    ]
    groups = list(dict.fromkeys([*GROUPS, *(row.group for row in found)]))
    found.sort(key=lambda row: (groups.index(row.group), PLACE.get(row.key, len(PLACE))))
    return [_with_ratio(row, found) for row in found]


def _measured(row: Row, results: Results) -> PageRow:
    known = KNOWN.get(row.key)
    standing, why = _standing(row, results)
    _, bound = bound_of(row.dtype, results.reference[1])
    return PageRow(
        row.key,
        row.dtype,
        row.title,
        known.group if known else row.group,
        known.side if known else "peer",
        standing,
        why,
        row,
        bound.most if bound and bound.measure == "max_abs" else None,
    )


def names(rows: Iterable[PageRow]) -> str:
    """Rows in a list: ``vLLM (f32, bf16); TGI``; dtypes are said where a row has several."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.title, []).append(row.dtype)
    return "; ".join(
        f"{title} ({', '.join(dtypes)})" if len(dtypes) > 1 else title
        for title, dtypes in found.items()
    )


def _standing(row: Row, results: Results) -> tuple[Standing, str]:
    if row.error is not None:
        return "failed", row.error
    if (row.key, row.dtype) == results.reference:
        return "right", "the reference"
    distance = row.distance
    if distance is None:
        return "uncompared", "its output was not compared with the reference's"
    if distance.non_finite:
        return "wrong", f"{distance.non_finite} of its outputs are not finite numbers"
    dtype, bound = bound_of(row.dtype, results.reference[1])
    if bound is None:
        return "wrong", f"no bound is stated for {row.dtype}, so nothing says that it is right"
    value = distance.max_abs if bound.measure == "max_abs" else distance.kl
    words = "largest difference" if bound.measure == "max_abs" else "mean KL divergence"
    if value is None:
        return "uncompared", f"its {words} from the reference was not recorded"
    sentence = f"its {words} from the reference is {digits(value)}"
    if value > bound.most:
        return "wrong", f"{sentence}, beyond the {bound.most:g} that {dtype} is allowed"
    return "right", f"{sentence}, within the {bound.most:g} that {dtype} is allowed"


def fastest(rows: Iterable[PageRow], metric: str) -> PageRow | None:
    """The row with the highest median, wrong and failed ones left out; None for no row."""
    best, most = None, 0.0
    for row in rows:
        measured = row.metric(metric)
        if row.standing in ("right", "uncompared") and measured and measured.median > most:
            best, most = row, measured.median
    return best


def _with_ratio(row: PageRow, rows: list[PageRow]) -> PageRow:
    """The row beside the fastest of those that it replaces, in its own dtype."""
    known, metric = KNOWN.get(row.key), PAIR_METRICS[row.serving]
    ours = row.metric(metric)
    if known is None or ours is None or not known.peers:
        return row
    peers = [peer for peer in rows if peer.key in known.peers and peer.dtype == row.dtype]
    peer = fastest(peers, metric)
    theirs = peer.metric(metric) if peer else None
    if peer is None or theirs is None:
        return row
    values = {**vars(row), "peer": peer.title, "ratio": ratio(ours, theirs)}
    return PageRow(**values)
