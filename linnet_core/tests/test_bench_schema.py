"""Results files that strangers wrote: read whole, or refused by the place that does not hold."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from linnet.bench import results
from linnet.bench.schema import METRICS, parse_results, read_results
from linnet.errors import BenchError
from linnet.plugins.descriptors import BenchMethod

FIXTURE = Path(__file__).parent / "data" / "smollm2-1.7b-h100.json"


@pytest.fixture
def data() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text())


def parse(data: Any) -> Any:
    return parse_results(json.dumps(data).encode(), "r.json")


def test_a_file_is_read_whole() -> None:
    found = read_results(FIXTURE)
    assert (found.model, found.machine.gpu) == ("smollm2-1.7b-instruct", "NVIDIA H100 80GB HBM3")
    assert found.reference == ("transformers", "bf16")
    assert found.serving is not None
    assert found.serving.prompt_tokens == (128, 512)
    assert len(found.rows) == 34
    first = found.rows[0]
    assert (first.metrics["ttft_ms"].median, first.metrics["ttft_ms"].low) == (15.8, None)
    assert first.distance is not None
    assert first.distance.max_abs == 0


def test_what_bench_writes_is_read(data: dict[str, Any]) -> None:
    method = BenchMethod("toy", "toys:T", "Toy", "Toys", ("f32",), api_version=1)
    row = results.new_row(method, "f32")
    row["metrics"] = {"ttft_ms": results.metric([3.0, 1.0])}
    data["rows"] = [row, results.new_row(method, "bf16", "its process ended\nwith status 1")]
    found = parse(data)
    assert found.rows[0].metrics["ttft_ms"].values == (3.0, 1.0)
    assert found.rows[1].error == "its process ended\nwith status 1"


def row_metric(data: dict[str, Any], name: str = "ttft_ms") -> dict[str, Any]:
    return data["rows"][1]["metrics"][name]


CHANGES: list[tuple[Any, str]] = [
    (lambda d: d.update(schema="linnet-bench/9"), r"schema is 'linnet-bench/9', and this Linnet"),
    (lambda d: d.pop("schema"), r"schema is None"),
    (lambda d: d.update(rows={}), r"rows is {}; it must be a list of 1000 or fewer"),
    (lambda d: d.update(rows=[1]), r"rows\[0\] is not an object"),
    (lambda d: d.update(rows=d["rows"][:1] * 2), r"rows\[1\]: a second row 'transformers' in bf16"),
    (lambda d: d.update(rows=d["rows"] * 40), r"a list of 1000 or fewer"),
    (lambda d: d.update(measured="yesterday"), r"measured is 'yesterday'; it must be a moment"),
    (lambda d: d.update(measured="2026-01-01"), r"a moment with its time zone"),
    (lambda d: d.pop("model"), r"model is missing; it must be an object"),
    (lambda d: d["model"].update(name=""), r"model.name is ''; it must be text"),
    (lambda d: d["versions"].update(torch=2), r"versions.torch is 2; it must be text"),
    (lambda d: d["workload"].update(runs=True), r"workload.runs is True; it must be a whole"),
    (lambda d: d["workload"].update(runs=1 << 80), r"workload.runs is \d+; it must be a whole"),
    (
        lambda d: d["workload"]["serving"].update(min_prompt_tokens=513),
        r"workload.serving.min_prompt_tokens is 513; it must be at most max_prompt_tokens, 512",
    ),
    (lambda d: d["rows"][1].update(key="../../x"), r"rows\[1\].key is '../../x'; .* a name of a-z"),
    (lambda d: d["rows"][1].update(dtype='"><b>'), r"rows\[1\].dtype is"),
    (
        lambda d: d["rows"][1].update(title="x" * 20_001),
        r"title is 'x+...; it must be text of 1 to",
    ),
    (lambda d: d["rows"][1].update(notes="x"), r"notes is 'x'; it must be a list of texts"),
    (lambda d: d["rows"][1].update(notes=[1]), r"notes is \[1\]"),
    (lambda d: d["rows"][1].update(metrics={}), r"metrics is {}; it must be one metric or more"),
    (lambda d: d["rows"][1].update(error="no"), r"error is 'no'; it must be null, since"),
    (
        lambda d: d["rows"][1]["metrics"].update(speed={}),
        r"rows\[1\] \(transformers-compiled bf16\).metrics has 'speed'; a metric is one of",
    ),
    (lambda d: row_metric(d).update(median=-1), r"metrics.ttft_ms.median is -1; it must be a fin"),
    (lambda d: row_metric(d).update(median="8"), r"median is '8'; it must be a finite number"),
    (lambda d: row_metric(d).update(median=float("nan")), r"median is nan; it must be a finite"),
    (lambda d: row_metric(d).update(median=float("inf")), r"median is inf; it must be a finite"),
    (lambda d: row_metric(d).update(n=0), r"ttft_ms.n is 0; it must be a whole number of 1"),
    (lambda d: row_metric(d).update(min=1), r"ttft_ms.min is 1; it must be there with max"),
    (lambda d: row_metric(d).update(min=9, max=10), r"median is 8.5; it must be between min 9 and"),
    (lambda d: row_metric(d).update(values=[8.5]), r"values is \[8.5\]; it must be the 10 values"),
    (lambda d: row_metric(d, "peak_bytes").pop("memory"), r"peak_bytes.memory is missing"),
    (lambda d: row_metric(d, "peak_bytes").update(memory="ram"), r"memory is 'ram'; .* resident"),
    (lambda d: d["rows"][1]["distance"].update(of="words"), r"distance.of is 'words'"),
    (lambda d: d["rows"][1]["distance"].update(max_abs=None), r"distance.max_abs is None"),
    (lambda d: d["rows"][1]["distance"].update(top1=1.5), r"distance.top1 is 1.5"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_what_does_not_hold_is_named(data: dict[str, Any], change: Any, message: str) -> None:
    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(BenchError, match=r"^r\.json: .*" + message):
        parse(broken)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": "linnet-bench/1", "schema": "linnet-bench/1"}',
        b'{"schema": ' + b"9" * 10_000 + b"}",
    ],
    ids=["empty", "list", "cut", "not UTF-8", "deep", "a key twice", "a long number"],
)
def test_what_is_no_results_file_is_refused(text: bytes) -> None:
    with pytest.raises(BenchError, match=r"^r\.json: "):
        parse_results(text, "r.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.json: cannot be read: No such file"):
        read_results(tmp_path / "none.json")
    with pytest.raises(BenchError, match=r"cannot be read: Is a directory"):
        read_results(tmp_path)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BenchError, match=r"larger than 32 MiB"):
        read_results(tmp_path / "large.json")


def test_text_moves_no_cursor_and_turns_no_line(data: dict[str, Any]) -> None:
    data["rows"][0]["notes"] = ["\x1b[31mred\x1b[0m", "a\u202eb", "half \ud800", "\x00\x07nul"]
    assert parse(data).rows[0].notes == ("red", "a\ufffdb", "half \ufffd", "\ufffd\ufffdnul")


def test_the_documents_list_every_metric() -> None:
    document = (Path(__file__).parents[2] / "docs" / "benchmark.md").read_text()
    for name in METRICS:
        assert f"`{name}`" in document
