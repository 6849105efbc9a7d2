"""Reading a results file that strangers may have written: ``linnet-bench/1``, checked whole.

``docs/benchmark.md`` documents the schema. Whatever does not hold is a BenchError that names the
file, the place in it and what should be there. Text comes out without characters that move a
cursor, reverse a line or cannot be written; keys that are not documented are left alone.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from linnet.bench.fields import Fields, shown
from linnet.bench.results import SCHEMA
from linnet.errors import BenchError
from linnet.weights.strict_json import loads

MAX_BYTES = 32 << 20
MAX_ROWS = 1000
METRICS = (
    "ttft_ms",
    "decode_tok_s",
    "serve_tok_s",
    "serve_ttft_ms",
    "load_s",
    "warmup_s",
    "peak_bytes",
)
MEMORIES = ("resident", "driver", "allocator", "reserved")
"""Which memory a peak is of; ``reserved`` is a pool whose size is a setting, not a need."""
DISTANCES = ("logits", "logprobs")


@dataclass(frozen=True)
class Metric:
    """One measured quantity. ``low`` and ``high`` are None where no spread was recorded."""

    median: float
    low: float | None
    high: float | None
    n: int
    values: tuple[float, ...] = ()
    memory: str = ""


@dataclass(frozen=True)
class RowDistance:
    """How far a row's output is from the reference's; None for what was not recorded.

    ``max_abs`` is None beside a ``non_finite`` above 0: the output had no finite distance.
    """

    of: str
    max_abs: float | None
    kl: float | None
    top1: float | None
    non_finite: int


@dataclass(frozen=True)
class Row:
    """One method in one dtype: measured, or the reason why not."""

    key: str
    dtype: str
    title: str
    group: str
    metrics: Mapping[str, Metric]
    distance: RowDistance | None
    share_of_limit: float | None
    notes: tuple[str, ...]
    error: str | None


@dataclass(frozen=True)
class Machine:
    """What it ran on; empty or None where it is not stated."""

    cpu: str
    gpu: str
    driver: str
    system: str
    cores: int | None
    threads: int | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Serving:
    """The workload of the serving rows."""

    name: str
    requests: int
    prompt_tokens: tuple[int, int]
    """The shortest and the longest prompt."""
    new_tokens: int
    in_flight: int


@dataclass(frozen=True)
class Results:
    """A results file. ``bandwidth`` is the highest measured, in bytes per second."""

    measured: datetime
    machine: Machine
    versions: Mapping[str, str]
    model: str
    family: str
    parameters: int | None
    prompt_tokens: int
    new_tokens: int
    runs: int
    warmups: int
    serving: Serving | None
    bandwidth: float | None
    reference: tuple[str, str]
    """Key and dtype of the row whose logits the others are compared with."""
    rows: tuple[Row, ...]


def read_results(path: Path) -> Results:
    """The results in a file. Raises BenchError for a file that cannot be read or does not hold."""
    return parse_results(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """A file that may be one of results, as it is."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BenchError(f"{path}: larger than {MAX_BYTES >> 20} MiB: no results file")
        return path.read_bytes()
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror or error}") from None


def parse_results(data: bytes, name: str) -> Results:
    """The results in JSON; ``name`` is what errors call it."""
    try:
        top = Fields(loads(data), name, "")
    except ValueError as error:
        raise BenchError(f"{name}: no results file: {error}") from None
    schema = top.values.get("schema")
    if schema != SCHEMA:
        raise BenchError(
            f"{name}: schema is {shown(schema)}, and this Linnet reads {SCHEMA!r}; measure again "
            "with this Linnet, or make the page with the one that measured"
        )
    workload = top.object("workload")
    model, reference = top.object("model"), top.maybe("reference", top.object)
    bandwidth = top.maybe("bandwidth", top.object)
    serving = workload.maybe("serving", workload.object)
    ends = ("before", "after") if bandwidth else ()
    speeds = [bandwidth.maybe(end, bandwidth.number) for end in ends if bandwidth]
    return Results(
        measured=top.time("measured"),
        machine=_machine(top.object("machine")),
        versions=top.object("versions").texts(),
        model=model.text("name"),
        family=model.maybe("family", model.text) or "",
        parameters=model.maybe("parameters", model.count),
        prompt_tokens=workload.count("prompt_tokens"),
        new_tokens=workload.count("new_tokens"),
        runs=workload.count("runs"),
        warmups=workload.count("warmups", least=0),
        serving=_serving(serving) if serving else None,
        bandwidth=max((speed for speed in speeds if speed), default=None),
        reference=(reference.name("key"), reference.name("dtype"))
        if reference
        else ("transformers", "f32"),
        rows=_rows(top),
    )


def _machine(machine: "Fields") -> Machine:
    return Machine(
        cpu=machine.maybe("cpu", machine.text) or "",
        gpu=machine.maybe("gpu", machine.text) or "",
        driver=machine.maybe("driver", machine.text) or "",
        system=machine.maybe("system", machine.text) or "",
        cores=machine.maybe("cores", machine.count),
        threads=machine.maybe("threads", machine.count),
        memory_bytes=machine.maybe("memory_bytes", machine.count),
    )


def _serving(serving: "Fields") -> Serving:
    shortest, longest = (serving.count(f"{end}_prompt_tokens") for end in ("min", "max"))
    if shortest > longest:
        serving.fail("min_prompt_tokens", f"at most max_prompt_tokens, {longest}")
    return Serving(
        name=serving.text("name"),
        requests=serving.count("requests"),
        prompt_tokens=(shortest, longest),
        new_tokens=serving.count("new_tokens"),
        in_flight=serving.count("in_flight"),
    )


def _rows(top: "Fields") -> tuple[Row, ...]:
    found = top.objects("rows", MAX_ROWS)
    rows: dict[tuple[str, str], Row] = {}
    for item in found:
        row = _row(item)
        if (row.key, row.dtype) in rows:
            raise BenchError(
                f"{item.file}: {item.path}: a second row {row.key!r} in {row.dtype}; each is "
                "there once"
            )
        rows[row.key, row.dtype] = row
    return tuple(rows.values())


def _row(item: "Fields") -> Row:
    key, dtype = item.name("key"), item.name("dtype")
    item = Fields(item.values, item.file, f"{item.path} ({key} {dtype})")
    metrics = item.object("metrics")
    unknown = set(metrics.values) - set(METRICS)
    if unknown:
        raise BenchError(
            f"{item.file}: {metrics.path} has {shown(min(unknown))}; a metric is one of "
            f"{', '.join(METRICS)}"
        )
    distance = item.maybe("distance", item.object)
    error = item.maybe("error", item.text)
    if error is None and not metrics.values:
        item.fail("metrics", "one metric or more, or the row has an error that says why not")
    if error is not None and metrics.values:
        item.fail("error", "null, since the row has metrics")
    return Row(
        key=key,
        dtype=dtype,
        title=item.text("title"),
        group=item.text("group"),
        metrics={name: _metric(metrics.object(name), name) for name in metrics.values},
        distance=_distance(distance) if distance else None,
        share_of_limit=item.maybe("share_of_limit", item.number),
        notes=item.list_of_texts("notes"),
        error=error,
    )


def _metric(item: "Fields", name: str) -> Metric:
    median, n = item.number("median"), item.count("n")
    low, high = (item.maybe(end, item.number) for end in ("min", "max"))
    if (low is None) != (high is None):
        item.fail("min", "there with max, or both null")
    if low is not None and high is not None and not low <= median <= high:
        item.fail("median", f"between min {low:g} and max {high:g}")
    values = item.maybe("values", item.numbers) or ()
    if values:
        agrees = (len(values), min(values), max(values)) == (n, low, high)
        if not agrees or not math.isclose(statistics.median(values), median, rel_tol=1e-9):
            item.fail("values", f"the {n} values that median, min and max are of")
    memory = item.maybe("memory", item.text) or ""
    if memory and memory not in MEMORIES:
        item.fail("memory", f"one of {', '.join(MEMORIES)}")
    if name == "peak_bytes" and not memory:
        item.fail("memory", f"one of {', '.join(MEMORIES)}: which memory the peak is of")
    return Metric(median, low, high, n, values, memory)


def _distance(item: "Fields") -> RowDistance:
    of = item.text("of")
    if of not in DISTANCES:
        item.fail("of", f"one of {', '.join(DISTANCES)}")
    non_finite = item.maybe("non_finite", lambda key: item.count(key, least=0)) or 0
    max_abs = item.maybe("max_abs", item.number)
    if max_abs is None and not non_finite:
        item.fail("max_abs", "a number of 0 or more, or non_finite above 0 says why there is none")
    top1 = item.maybe("top1", item.number)
    if top1 is not None and top1 > 1:
        item.fail("top1", "a share, 0 to 1")
    return RowDistance(of, max_abs, item.maybe("kl", item.number), top1, non_finite)
