"""Making the rows of a results file, and writing it.

``docs/benchmark.md`` documents the schema; ``linnet.bench.schema`` reads it back.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linnet.distance import compare, compare_logprobs
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement
from linnet.plugins.descriptors import BenchMethod
from linnet.weights.checkpoint import Array
from linnet.weights.safetensors import write_text

SCHEMA = "linnet-bench/1"


def metric(values: Sequence[float]) -> dict[str, Any]:
    """Median and spread of the values of one run each, and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
        "values": list(values),
    }


def row_of(
    method: BenchMethod,
    job: Job,
    measurement: Measurement,
    reference: Array | None,
    bandwidth: float,
) -> dict[str, Any]:
    """The row of a finished job, compared with the reference's logits f32 ``[S, V]``.

    Raises BenchError where a run did not do what was asked.
    """
    row = new_row(method, job.dtype)
    row["granted"] = measurement.granted
    row["notes"] = [*method.notes, *measurement.notes]
    if reference is not None:
        row["distance"] = _distance(Path(job.folder), reference)
    row["metrics"] = {
        **(_serving(job, measurement) if method.serving else _single(job, measurement)),
        "load_s": metric([measurement.load_s]),
        "warmup_s": metric([measurement.warmup_s]),
        "peak_bytes": {**metric([measurement.peak_bytes]), "memory": measurement.memory},
    }
    if measurement.weight_bytes is not None and not method.serving:
        speed = row["metrics"]["decode_tok_s"]["median"]
        row["share_of_limit"] = speed * measurement.weight_bytes / bandwidth
    return row


def _single(job: Job, measurement: Measurement) -> dict[str, Any]:
    """The metrics of one request at a time."""
    wanted = job.workload.new_tokens
    for number, run in enumerate(measurement.runs, 1):
        count = len(run.tokens)
        if count != wanted and (measurement.fixed_length or not 2 <= count < wanted):
            raise BenchError(f"run {number} gave {count} tokens, not {wanted}: its speed is void")
    decode = [(len(run.tokens) - 1) / run.decode_s for run in measurement.runs]
    ttft = [run.ttft_ms for run in measurement.runs]
    return {"ttft_ms": metric(ttft), "decode_tok_s": metric(decode)}


def _serving(job: Job, measurement: Measurement) -> dict[str, Any]:
    """The metrics of many requests: the tokens of all, and the median request's first token."""
    assert job.serving is not None
    count, wanted = job.serving.requests, job.serving.new_tokens
    for number, serve in enumerate(measurement.serves, 1):
        lengths = {len(tokens) for tokens in serve.tokens}
        if measurement.fixed_length:
            right = lengths == {wanted}
        else:
            right = all(0 < length <= wanted for length in lengths)
        if len(serve.tokens) != count or not right:
            raise BenchError(
                f"run {number} gave {len(serve.tokens)} requests of {sorted(lengths)} tokens, not "
                f"{count} of {wanted}: its speed is void"
            )
        if len(serve.ttft_ms) not in (0, count):
            raise BenchError(
                f"run {number} gave {len(serve.ttft_ms)} times to first tokens of {count} requests"
            )
    if not measurement.serves:
        raise BenchError("it measured no run")
    speeds = [sum(map(len, serve.tokens)) / serve.seconds for serve in measurement.serves]
    waits = [statistics.median(serve.ttft_ms) for serve in measurement.serves if serve.ttft_ms]
    found = {"serve_tok_s": metric(speeds)}
    return {**found, "serve_ttft_ms": metric(waits)} if waits else found


def _distance(folder: Path, reference: Array) -> dict[str, Any] | None:
    """Of logits, or of log-probabilities where there are no logits; ``of`` says which."""
    logits, listed = folder / "probe.npy", folder / "probe.npz"
    if logits.exists():
        return {"of": "logits", **compare(reference, np.load(logits)).to_json()}
    if listed.exists():
        with np.load(listed) as found:
            distance = compare_logprobs(reference, found["ids"], found["logprobs"])
        return {"of": "logprobs", **distance.to_json()}
    return None


def new_row(method: BenchMethod, dtype: str, error: str | None = None) -> dict[str, Any]:
    """A row with nothing measured yet, or the reason why nothing was."""
    return {
        "key": method.name,
        "dtype": dtype,
        "title": method.title,
        "group": method.group,
        "granted": None,
        "metrics": {},
        "distance": None,
        "share_of_limit": None,
        "notes": list(method.notes),
        "error": error,
    }


def save(results: dict[str, Any], path: Path) -> None:
    """Write the file whole: a killed benchmark keeps its finished rows."""
    write_text(path, json.dumps(results, indent=1) + "\n")
