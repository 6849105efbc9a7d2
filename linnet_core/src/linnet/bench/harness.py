"""Running methods one after the other, each in a process of its own, on the same tokens."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from linnet.bench.machine import describe_machine, read_bandwidth, versions
from linnet.bench.results import SCHEMA, new_row, row_of
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Workload
from linnet.plugins.descriptors import BenchMethod
from linnet.runtime.load import bind

REFERENCE = "transformers"
"""The method whose f32 logits the others are compared with."""
TIMEOUT_S = 3600


class Bench:
    """A benchmark of one model: ``run`` gives the results as they grow, row by row."""

    def __init__(self, model: str, workload: Workload, threads: int) -> None:
        self.model, self.workload, self.threads = model, workload, threads
        bound = bind(model)
        if bound.max_positions is not None and workload.context > bound.max_positions:
            raise BenchError(
                f"{workload.context} positions are needed, but {model} has {bound.max_positions}"
            )
        self.prompts = workload.prompts(bound.vocab)
        self.folder = Path(tempfile.mkdtemp(prefix="linnet-bench-"))
        self.reference: Path | None = None
        self.forced: list[int] | None = None
        self.results: dict[str, Any] = {
            "schema": SCHEMA,
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(threads),
            "versions": versions(),
            "model": {
                "name": model,
                "family": bound.program.family,
                "parameters": bound.program.parameter_count,
            },
            "workload": {**vars(workload)},
            "bandwidth": {"before": read_bandwidth(threads)},
            "rows": [],
        }

    def run(
        self,
        methods: Sequence[tuple[BenchMethod, str]],
        each: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Measure every (method, dtype); ``each`` is told the results after every row.

        The reference goes first, since the others decode its tokens. A method that fails costs
        its row, not the benchmark.
        """
        ordered = sorted(methods, key=lambda m: (m[0].name, m[1]) != (REFERENCE, "f32"))
        for method, dtype in ordered:
            self.results["rows"].append(self._row(method, dtype))
            each(self.results)
        after = read_bandwidth(self.threads)
        self.results["bandwidth"]["after"] = after
        each(self.results)
        return self.results

    def _row(self, method: BenchMethod, dtype: str) -> dict[str, Any]:
        folder = self.folder / f"{method.name}-{dtype}"
        folder.mkdir()
        job = Job(
            method=method.name,
            model=self.model,
            dtype=dtype,
            threads=self.threads,
            workload=self.workload,
            prompts=self.prompts,
            forced=self.forced,
            folder=str(folder),
        )
        bandwidth = read_bandwidth(self.threads)
        try:
            measurement = run_job(method, job)
            if (method.name, dtype) == (REFERENCE, "f32"):
                self.forced = measurement.tokens
                self.reference = folder / "probe.npy"
            bandwidth = max(bandwidth, read_bandwidth(self.threads))
            return row_of(method, job, measurement, self.reference, bandwidth)
        except BenchError as error:
            return new_row(method, dtype, str(error))


def run_job(method: BenchMethod, job: Job) -> Measurement:
    """Run a job in a process. Raises BenchError with the end of what the process said."""
    path = Path(job.folder) / "job.json"
    job.save(path)
    command = [sys.executable, "-m", "linnet.bench.child", str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"did not finish within {TIMEOUT_S} s") from None
    result = path.with_name("result.json")
    if done.returncode or not result.exists():
        last = "\n".join(done.stderr.strip().splitlines()[-3:]) or "it said nothing"
        raise BenchError(f"its process ended with status {done.returncode}: {last}")
    return Measurement.read(result)
