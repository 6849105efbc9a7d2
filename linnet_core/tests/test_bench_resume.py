"""A benchmark that was interrupted: what is kept, what is measured again, what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linnet.bench import harness, resume
from linnet.bench.results import SCHEMA, new_row, save
from linnet.errors import BenchError
from linnet.nest.random import write_random
from linnet.plugins.benchmark import Job, Measurement, Run, Workload
from linnet.plugins.descriptors import BenchMethod
from linnet.testing.fixtures import f0_config

SMALL = Workload(prompt_tokens=5, new_tokens=4, runs=2, warmups=1, probe_tokens=3)
RESULTS: dict[str, Any] = {
    "schema": SCHEMA,
    "machine": {"cpu": "toy", "threads": 2},
    "versions": {"linnet": "0.1.0"},
    "model": {"name": "toy"},
    "workload": {**vars(SMALL)},
    "rows": [],
}


def method(name: str) -> BenchMethod:
    return BenchMethod(
        name=name, target="toys:T", title=name, group="Toys", dtypes=("f32",), api_version=1
    )


def test_finished_rows_are_kept_and_failed_ones_not(tmp_path: Path) -> None:
    rows = [new_row(method("a"), "f32"), new_row(method("b"), "f32", "not set up")]
    save({**RESULTS, "rows": rows}, tmp_path / "results.json")
    kept = resume.finished_rows(tmp_path / "results.json", RESULTS)
    assert [row["key"] for row in kept] == ["a"]


@pytest.mark.parametrize(
    ("part", "key", "message"),
    [
        ("model", "name", r"another model \(name 'other' there, 'toy' here\)"),
        ("workload", "runs", r"another workload \(runs 'other' there, 2 here\)"),
        ("machine", "cpu", r"another machine \(cpu 'other' there, 'toy' here\)"),
        ("versions", "torch", r"another versions \(torch 'other' there, None here\)"),
    ],
)
def test_another_benchmark_is_not_mixed_in(
    tmp_path: Path, part: str, key: str, message: str
) -> None:
    other = copy.deepcopy(RESULTS)
    other[part][key] = "other"
    save(other, tmp_path / "results.json")
    with pytest.raises(BenchError, match=message):
        resume.finished_rows(tmp_path / "results.json", RESULTS)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"rows": []}', '{"schema": "x/9"}'])
def test_what_is_no_results_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"no results file|has the schema 'x/9'"):
        resume.finished_rows(path, RESULTS)
    assert path.read_text() == text


def test_the_reference_survives_beside_the_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    resume.Reference([1, 2, 0], logits).save(path, RESULTS)
    found = resume.Reference.read(path, RESULTS)
    assert found is not None
    assert found.tokens == [1, 2, 0]
    np.testing.assert_array_equal(found.logits, logits)
    assert resume.Reference.read(path, {**RESULTS, "model": {"name": "other"}}) is None
    assert resume.Reference.read(tmp_path / "none.json", RESULTS) is None


def test_a_killed_benchmark_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is interrupted in its third row; the second start measures that row and no other."""
    write_random(f0_config(), tmp_path / "model", seed=0, dtype="f32")
    measured: list[str] = []
    broken = {"b"}

    def run_job(method: BenchMethod, job: Job, before: Any) -> Measurement:
        before()
        measured.append(method.name)
        if method.name in broken:
            raise KeyboardInterrupt
        assert job.forced == (None if method.name == "transformers" else [7, 7, 7])
        np.save(Path(job.folder) / "probe.npy", np.zeros((4, 136), np.float32))
        runs = [Run(1.0, 1.0, [1] * 4)] * 2
        return Measurement(runs, 1.0, 1.0, 1, "resident", {}, tokens=[7, 7, 7])

    monkeypatch.setattr(harness, "run_job", run_job)
    monkeypatch.setattr(harness, "read_bandwidth", lambda threads: 1.0)
    path = tmp_path / "results.json"
    wanted = [(method(name), "f32") for name in ("a", "b", "transformers")]
    first = harness.Bench(str(tmp_path / "model"), SMALL, 1, path)
    with pytest.raises(KeyboardInterrupt):
        first.run(wanted, lambda row: None)
    assert measured == ["transformers", "a", "b"]

    broken.clear()
    again = harness.Bench(str(tmp_path / "model"), SMALL, 1, path)
    again.run(wanted, lambda row: None)
    assert measured == ["transformers", "a", "b", "b"]
    rows = json.loads(path.read_text())["rows"]
    assert [row["key"] for row in rows] == ["transformers", "a", "b"]
    assert all(row["distance"]["max_abs"] == 0 for row in rows)
    assert all(row["took_s"] >= 0 for row in rows)

    (tmp_path / "results.reference.npz").unlink()
    harness.Bench(str(tmp_path / "model"), SMALL, 1, path).run(wanted, lambda row: None)
    assert measured[4:] == ["transformers"]
