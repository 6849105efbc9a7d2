"""The benchmark's parts: what is told, timed, counted and compared."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from linnet.bench import machine, results, sessions
from linnet.bench.harness import run_job
from linnet.cli.bench import in_dtypes
from linnet.errors import BenchError, LinnetError
from linnet.plugins.benchmark import (
    SERVING,
    Job,
    Measurement,
    Prepared,
    Run,
    Serve,
    Serving,
    Workload,
)
from linnet.plugins.descriptors import BenchMethod
from linnet.plugins.interfaces import LoadOptions
from linnet.reference.backend import ReferenceBackend
from linnet.testing.backends import bind

SMALL = Workload(prompt_tokens=5, new_tokens=4, runs=2, warmups=1, probe_tokens=3)
METHOD = BenchMethod(
    name="toy", target="toys:Toy", title="Toy", group="Toys", dtypes=("f32",), api_version=1
)


MANY = Serving("tiny", 3, 2, 5, 4, in_flight=2, runs=2)


def job(folder: Path, **changes: object) -> Job:
    given = Job("toy", "model", "f32", 1, SMALL, SMALL.prompts(136), None, str(folder))
    return replace(given, **changes)


def measurement(tokens: int = 4) -> Measurement:
    runs = [Run(10.0, 0.5, [1] * tokens), Run(30.0, 0.25, [1] * tokens)]
    return Measurement(
        runs=runs,
        load_s=1.0,
        warmup_s=2.0,
        peak_bytes=100,
        memory="resident",
        granted={"dtype": "f32"},
        weight_bytes=1000,
    )


def served_measurement(tokens: int = 4, requests: int = 3) -> Measurement:
    serves = [
        Serve(2.0, [5.0, 7.0, 90.0][:requests], [[1] * tokens] * requests),
        Serve(1.0, [6.0, 8.0, 10.0][:requests], [[1] * tokens] * requests),
    ]
    return replace(measurement(), runs=[], serves=serves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"new_tokens": 1}, "new_tokens is 1; decoding takes 2 or more"),
        ({"runs": 0}, "runs is 0"),
        ({"warmups": -1}, "warmups is -1"),
    ],
)
def test_a_workload_that_measures_nothing_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        Workload(**changes)


def test_prompts_share_no_prefix() -> None:
    prompts = Workload(prompt_tokens=7, runs=10, warmups=3).prompts(136)
    assert len(prompts) == 14
    assert {len(prompt) for prompt in prompts} == {7}
    assert len({prompt[0] for prompt in prompts}) == 14
    assert all(0 <= token < 136 for prompt in prompts for token in prompt)
    assert prompts == Workload(prompt_tokens=7, runs=10, warmups=3).prompts(136)


def test_jobs_and_measurements_survive_their_files(tmp_path: Path) -> None:
    given = job(tmp_path)
    given.save(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == given
    prepared = replace(given, prepared=Prepared("a/model.gguf", 10, ["a note"]))
    prepared.save(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == prepared
    served = replace(given, serving=MANY, requests=MANY.prompts(136))
    served.save(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == served
    for told in (measurement(), served_measurement()):
        told.save(tmp_path / "result.json")
        assert Measurement.read(tmp_path / "result.json") == told


def test_a_row_holds_medians_spread_and_share(tmp_path: Path) -> None:
    row = results.row_of(METHOD, job(tmp_path), measurement(), None, bandwidth=36_000.0)
    ttft, decode = row["metrics"]["ttft_ms"], row["metrics"]["decode_tok_s"]
    assert ttft == {"median": 20.0, "min": 10.0, "max": 30.0, "n": 2, "values": [10.0, 30.0]}
    assert decode == {"median": 9.0, "min": 6.0, "max": 12.0, "n": 2, "values": [6.0, 12.0]}
    assert row["metrics"]["peak_bytes"]["memory"] == "resident"
    assert row["share_of_limit"] == 9.0 * 1000 / 36_000
    assert row["distance"] is None
    assert row["error"] is None


def test_a_run_that_ends_early_voids_its_row(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="run 1 gave 3 tokens, not 4: its speed is void"):
        results.row_of(METHOD, job(tmp_path), measurement(tokens=3), None, 1.0)


def test_a_row_that_serves_holds_throughput_and_waits(tmp_path: Path) -> None:
    method, given = replace(METHOD, serving=True), replace(job(tmp_path), serving=MANY)
    row = results.row_of(method, given, served_measurement(), None, 1.0)
    assert row["metrics"]["serve_tok_s"]["values"] == [6.0, 12.0]
    assert row["metrics"]["serve_ttft_ms"]["values"] == [7.0, 8.0]  # of the median request
    assert not {"ttft_ms", "decode_tok_s"} & set(row["metrics"])
    assert row["share_of_limit"] is None
    silent = [replace(serve, ttft_ms=[]) for serve in served_measurement().serves]
    told = replace(served_measurement(), serves=silent)
    assert "serve_ttft_ms" not in results.row_of(method, given, told, None, 1.0)["metrics"]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (served_measurement(tokens=3), r"run 1 gave 3 requests of \[3\] tokens, not 3 of 4"),
        (served_measurement(requests=2), r"run 1 gave 2 requests of \[4\] tokens, not 3 of 4"),
        (measurement(), "it measured no run"),
    ],
)
def test_a_serving_run_that_is_not_whole_voids_its_row(
    tmp_path: Path, told: Measurement, message: str
) -> None:
    method, given = replace(METHOD, serving=True), replace(job(tmp_path), serving=MANY)
    with pytest.raises(BenchError, match=message):
        results.row_of(method, given, told, None, 1.0)


@pytest.mark.parametrize("serving", SERVING.values(), ids=SERVING)
def test_requests_have_their_lengths_and_share_no_prefix(serving: Serving) -> None:
    warmup, *runs = serving.prompts(49152)
    assert len(warmup) == serving.in_flight
    assert [len(run) for run in runs] == [serving.requests] * serving.runs
    lengths = [len(prompt) for prompt in runs[0]]
    assert serving.min_prompt_tokens <= min(lengths) <= max(lengths) <= serving.max_prompt_tokens
    assert len(set(lengths)) > 10
    assert all([len(prompt) for prompt in run] == lengths for run in runs)
    firsts = [prompt[0] for run in (warmup, *runs) for prompt in run]
    assert len(set(firsts)) == len(firsts)
    assert serving.prompts(49152) == [warmup, *runs]


def test_too_few_tokens_for_prompts_that_start_differently() -> None:
    with pytest.raises(BenchError, match="56 prompts that start differently are needed"):
        SERVING["small"].prompts(50)


def test_the_distance_is_of_the_saved_logits(tmp_path: Path) -> None:
    reference = np.zeros((4, 136), np.float32)
    reference[:, 7] = 1.0
    other = reference.copy()
    other[2, 5] = 1.5
    np.save(tmp_path / "probe.npy", other)
    row = results.row_of(METHOD, job(tmp_path), measurement(), reference, 1.0)
    assert row["distance"]["of"] == "logits"
    assert row["distance"]["max_abs"] == 1.5
    assert row["distance"]["top1"] == 0.75


def test_log_probabilities_are_compared_where_there_are_no_logits(tmp_path: Path) -> None:
    reference = np.zeros((4, 8), np.float32)
    reference[:, 7] = 1.0
    logprobs = reference - np.log(np.exp(reference).sum(-1, keepdims=True))
    logprobs[2, 5] += 0.25
    ids = np.tile(np.arange(8), (4, 1))
    np.savez(tmp_path / "probe.npz", ids=ids, logprobs=logprobs)
    row = results.row_of(METHOD, job(tmp_path), measurement(), reference, 1.0)
    assert row["distance"]["of"] == "logprobs"
    assert row["distance"]["max_abs"] == pytest.approx(0.25)
    assert row["distance"]["top1"] == 1.0


def test_timed_tokens_are_the_probe_s_own() -> None:
    """What is timed and what the distance is taken of choose the same tokens."""
    options = LoadOptions(dtype="f32", rows=1, max_seq=32, threads=1)
    session = ReferenceBackend().load(bind("f0"), options)
    prompt = SMALL.prompts(136)[0]
    run = sessions.generate(session, prompt, 6)
    tokens, logits = sessions.probe(session, prompt, None, 5)
    assert run.tokens == [*tokens, int(logits[-1].argmax())]
    forced, again = sessions.probe(session, prompt, tokens, 5)
    assert forced == tokens
    np.testing.assert_array_equal(again, logits)


def test_what_a_step_reads() -> None:
    """Weights in use once: an embedding's rows count only where a head is tied to them."""
    model = bind("f0")
    layer = 2 * 48 + 96 * 48 + 2 * 32 * 48 + 48 * 96 + 3 * 80 * 48
    cache = 10 * 3 * 2 * 2 * 16
    assert sessions.step_bytes(model, "bf16", 10) == 2 * (3 * layer + 48 + 136 * 48 + cache)
    assert sessions.step_bytes(bind("tied"), "bf16", 10) == 2 * (3 * layer + 48 + 136 * 48 + cache)


def test_a_process_that_dies_costs_its_row(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"^there is no bench method 'toy'"):
        run_job(METHOD, job(tmp_path))


def test_a_process_that_hangs_costs_its_row(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"'measure' did not finish within 0.05 s; .* --limit"):
        run_job(METHOD, replace(job(tmp_path), limit_s=0.05))


def test_the_peak_is_what_was_held() -> None:
    """200 MB more, in a process of its own."""
    code = (
        "from linnet.bench.machine import peak_resident_bytes as peak\n"
        "before = peak(); held = bytearray(200_000_000); print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 190_000_000 <= int(done.stdout) <= 260_000_000


def test_the_machine_says_what_it_is() -> None:
    about = machine.describe_machine(2)
    assert about["threads"] == 2
    assert about["cores"] == os.cpu_count()
    assert about["memory_bytes"] > 1 << 28
    assert machine.versions()["linnet"]
    assert machine.read_bandwidth(1, size=1 << 20, repeats=1) > 0


@pytest.mark.parametrize("kernel", ["x86_64 Kernel Module", "Open Kernel Module for x86_64"])
def test_gpus_are_named_as_the_driver_names_them(tmp_path: Path, kernel: str) -> None:
    assert machine.gpus(tmp_path) == {}
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t 77\n")
    (tmp_path / "version").write_text(
        f"NVRM version: NVIDIA UNIX {kernel}  580.126.09  Release Build  (dvs-builder@x)\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    about = machine.gpus(tmp_path)
    assert about == {"gpu": "2 x NVIDIA H100 80GB HBM3", "driver": "580.126.09"}


def test_results_are_json(tmp_path: Path) -> None:
    row = results.new_row(METHOD, "f32", "not installed")
    results.save({"schema": results.SCHEMA, "rows": [row]}, tmp_path / "results.json")
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["schema"] == "linnet-bench/1"
    assert set(saved["rows"][0]) == {
        "key", "dtype", "title", "group", "granted", "metrics", "distance", "share_of_limit",
        "notes", "error",
    }  # fmt: skip


def test_what_is_compared_is_timed_one_after_the_other() -> None:
    def method(name: str, group: str, *dtypes: str) -> BenchMethod:
        return BenchMethod(name, "x:X", name, group, dtypes, api_version=1)

    methods = [
        method("peer", "one", "f32", "bf16"),
        method("many", "two", "bf16"),
        method("ours", "one", "bf16", "f32", "int8"),
    ]
    pairs = [(m.name, dtype) for m, dtype in in_dtypes(methods, ["f32", "bf16", "f32"])]
    assert pairs == [
        *(("peer", "f32"), ("ours", "f32"), ("peer", "bf16"), ("ours", "bf16")),
        ("many", "bf16"),
    ]
    with pytest.raises(LinnetError, match="no method to measure in f64"):
        in_dtypes(methods, ["f64"])
