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
    wanted = job.workload.new_tokens
    for number, run in enumerate(measurement.runs, 1):
        if len(run.tokens) != wanted:
            raise BenchError(
                f"run {number} gave {len(run.tokens)} tokens, not {wanted}: its speed is void"
            )
    decode = [(wanted - 1) / run.decode_s for run in measurement.runs]
    row = new_row(method, job.dtype)
    row["granted"] = measurement.granted
    row["metrics"] = {
        "ttft_ms": metric([run.ttft_ms for run in measurement.runs]),
        "decode_tok_s": metric(decode),
        "load_s": metric([measurement.load_s]),
        "warmup_s": metric([measurement.warmup_s]),
        "peak_bytes": {**metric([measurement.peak_bytes]), "memory": measurement.memory},
    }
    if measurement.weight_bytes is not None:
        row["share_of_limit"] = statistics.median(decode) * measurement.weight_bytes / bandwidth
    row["notes"] = [*method.notes, *measurement.notes]
    if reference is not None:
        row["distance"] = _distance(Path(job.folder), reference)
    return row


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
