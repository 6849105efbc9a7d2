"""Every number of a page as CSV, in the units of the results file."""

import csv
import io
from collections.abc import Sequence

from linnet.bench.page.rows import PageRow
from linnet.bench.schema import METRICS


def table_csv(rows: Sequence[PageRow]) -> str:
    """Every number as CSV, in the units of the results file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures = [f"{name}_{part}" for name in METRICS for part in ("median", "min", "max", "n")]
    writer.writerow(
        [
            *("key", "dtype", "title", "group", "standing", *measures, "memory"),
            *("distance_of", "distance_max_abs", "distance_kl", "distance_top1", "share_of_limit"),
            *("ratio", "ratio_low", "ratio_high", "ratio_to", "notes", "error"),
        ]
    )
    for row in rows:
        metrics = [row.metric(name) for name in METRICS]
        numbers = [
            number
            for metric in metrics
            for number in (
                (metric.median, metric.low, metric.high, metric.n) if metric else (None,) * 4
            )
        ]
        peak = row.metric("peak_bytes")
        distance = row.row.distance if row.row else None
        writer.writerow(
            [
                *(row.key, row.dtype, _cell(row.title), _cell(row.group), row.standing),
                *numbers,
                peak.memory if peak else "",
                *(
                    (distance.of, distance.max_abs, distance.kl, distance.top1)
                    if distance
                    else (None,) * 4
                ),
                row.row.share_of_limit if row.row else None,
                *(
                    (row.ratio.value, row.ratio.low, row.ratio.high)
                    if row.ratio
                    else (None, None, None)
                ),
                _cell(row.peer),
                _cell("; ".join(row.row.notes) if row.row else ""),
                _cell(row.why if row.standing == "failed" else ""),
            ]
        )
    return text.getvalue()


def _cell(text: str) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
