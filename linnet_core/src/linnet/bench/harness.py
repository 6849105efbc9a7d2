"""Running methods one after the other, each in a process of its own, on the same tokens."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from linnet.bench import resume
from linnet.bench.environments import Environment, Record, clean_variables, ready
from linnet.bench.machine import describe_machine, has_gpu, read_bandwidth, versions
from linnet.bench.results import SCHEMA, new_row, row_of, save
from linnet.errors import BenchError, LinnetError
from linnet.plugins.benchmark import (
    LIMIT_S,
    SERVING,
    Job,
    Measurement,
    Prepared,
    Serving,
    Workload,
)
from linnet.plugins.descriptors import BenchMethod
from linnet.plugins.manager import plugin_manager
from linnet.runtime.load import bind
from linnet.weights.binding import main_encoding

REFERENCE = "transformers"
"""The method whose f32 logits the others are compared with."""


class Bench:
    """A benchmark of one model: ``run`` gives the results as they grow, row by row.

    ``encoding`` is what the model's file stores most of its numbers in: ``bf16``, ``q4_1``.

    With ``output`` they are saved there after every row, and what is there already of the same
    benchmark is kept. Raises BenchError for a file of another benchmark.
    """

    def __init__(
        self,
        model: str,
        workload: Workload,
        threads: int,
        output: Path | None = None,
        serving: Serving = SERVING["small"],
        limit_s: float = LIMIT_S,
    ) -> None:
        self.model, self.workload, self.threads, self.output = model, workload, threads, output
        bound = bind(model)
        if bound.max_positions is not None and workload.context > bound.max_positions:
            raise BenchError(
                f"{workload.context} positions are needed, but {model} has {bound.max_positions}"
            )
        self.prompts = workload.prompts(bound.vocab)
        self.encoding = main_encoding(bound)
        self.limit_s = limit_s
        self.serving, self.vocab, self.max_positions = serving, bound.vocab, bound.max_positions
        self.reference: resume.Reference | None = None
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
            "workload": {**vars(workload), "serving": {**vars(serving)}},
            "reference": {"key": REFERENCE, "dtype": "f32"},
            "bandwidth": {},
            "rows": [],
        }
        if output is not None and output.exists():
            self.results["rows"] = resume.finished_rows(output, self.results)
            self.reference = resume.Reference.read(output, self.results)
        if self.reference is None:  # the others are compared with it, so it must be there
            self.results["rows"] = [row for row in self.results["rows"] if not is_reference(row)]
        self.results["bandwidth"]["before"] = read_bandwidth(threads)

    def run(
        self,
        methods: Sequence[tuple[BenchMethod, str]],
        each: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Measure every (method, dtype) that has no finished row; ``each`` is told every row.

        The reference goes first, since the others decode its tokens. A method that fails costs
        its row, not the benchmark.
        """
        kept = {(row["key"], row["dtype"]) for row in self.results["rows"]}
        order = sorted(methods, key=lambda m: (m[0].name, m[1]) != (REFERENCE, "f32"))
        for method, dtype in order:
            if (method.name, dtype) in kept:
                continue
            start = time.monotonic()
            row = self._row(method, dtype)
            row["took_s"] = round(time.monotonic() - start, 1)
            self.results["rows"].append(row)
            self._save()
            each(row)
        self.results["bandwidth"]["after"] = read_bandwidth(self.threads)
        wanted = [(method.name, dtype) for method, dtype in order]
        self.results["rows"].sort(  # as they were asked for, wherever a run began again
            key=lambda row: (
                wanted.index((row["key"], row["dtype"]))
                if (row["key"], row["dtype"]) in wanted
                else len(wanted)
            )
        )
        self._save()
        return self.results

    def _save(self) -> None:
        if self.output is not None:
            save(self.results, self.output)

    def _row(self, method: BenchMethod, dtype: str) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix=f"linnet-bench-{method.name}-{dtype}-"))
        job = Job(
            method=method.name,
            model=self.model,
            dtype=dtype,
            threads=self.threads,
            workload=self.workload,
            prompts=self.prompts,
            forced=self.reference.tokens if self.reference else None,
            folder=str(folder),
            limit_s=self.limit_s,
        )
        try:
            if method.serving:
                job = replace(job, serving=self.serving, requests=self._requests())
            bandwidth = 0.0

            def before() -> None:
                nonlocal bandwidth
                bandwidth = read_bandwidth(self.threads)

            measurement = run_job(method, job, before)
            if (method.name, dtype) == (REFERENCE, "f32"):
                self.reference = resume.Reference.of(measurement, folder)
                if self.output is not None:
                    self.reference.save(self.output, self.results)
            bandwidth = max(bandwidth, read_bandwidth(self.threads))
            logits = self.reference.logits if self.reference else None
            return row_of(method, job, measurement, logits, bandwidth)
        except LinnetError as error:
            return new_row(method, dtype, str(error))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _requests(self) -> list[list[list[int]]]:
        """The prompts of the serving workload. Raises BenchError where the model is too short."""
        longest = self.serving.context
        if self.max_positions is not None and longest > self.max_positions:
            raise BenchError(
                f"serving needs {longest} positions, but {self.model} has {self.max_positions}"
            )
        return self.serving.prompts(self.vocab)


def is_reference(row: dict[str, Any]) -> bool:
    """Whether a row is that of the reference."""
    return (row["key"], row["dtype"]) == (REFERENCE, "f32")


def run_job(
    method: BenchMethod, job: Job, before: Callable[[], None] = lambda: None
) -> Measurement:
    """Run a job in a process, in the method's environment; ``before`` is called just before.

    Raises BenchError for a method that needs a GPU where there is none, with the command that sets
    the environment up where it is not there, and with the end of what the process said where it
    fails.
    """
    if method.gpu and not has_gpu():
        raise BenchError(f"{method.title} needs a GPU, and this machine has none")
    path = Path(job.folder) / "job.json"
    if not method.environment:
        job.save(path)
        before()
        return Measurement.read(_step("measure", path, sys.executable, job.limit_s))
    environment: Environment
    record: Record
    environment, record = ready(plugin_manager(), method)
    job.save(path)
    prepared = Prepared.read(_step("prepare", path, sys.executable, job.limit_s))
    replace(job, prepared=prepared).save(path)
    before()
    measurement = Measurement.read(_step("measure", path, str(environment.python), job.limit_s))
    notes = [record.versions(), *prepared.notes, *measurement.notes]
    return replace(measurement, notes=notes)


def _step(step: str, path: Path, python: str, limit_s: float) -> Path:
    """Take a step of a job in a process of its own; the file that it wrote."""
    said = path.with_name(f"{step}.log")
    own = python == sys.executable
    with said.open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "linnet.bench.child", step, str(path)],
            stdin=subprocess.PIPE,  # it is closed when we end, and so does the process
            stdout=log,
            stderr=log,
            env=None if own else clean_variables(),
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise BenchError(
                f"its step {step!r} did not finish within {limit_s:g} s; give it more with --limit"
            ) from None
        finally:
            _end(process)
    result = path.with_name("prepared.json" if step == "prepare" else "result.json")
    if status or not result.exists():
        failure = path.with_name("failure.txt")
        if failure.exists():
            raise BenchError(failure.read_text())
        lines = said.read_text(errors="replace").strip().splitlines()
        last = "\n".join(lines[-3:]) or "it said nothing"
        raise BenchError(f"its process ended with status {status}: {last}")
    return result


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs, and in any case those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
