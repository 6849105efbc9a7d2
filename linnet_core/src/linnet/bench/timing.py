"""What every method does alike: warm up, then time each run, with nothing between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from linnet.bench.machine import peak_resident_bytes
from linnet.plugins.benchmark import Job, Run, Serve


@dataclass(frozen=True)
class Timed:
    """The part of a ``Measurement`` that comes of the runs; resident memory, up to their end."""

    warmup_s: float
    peak_bytes: int
    runs: list[Run] = field(default_factory=list)
    serves: list[Serve] = field(default_factory=list)
    memory: str = "resident"


def time_runs(job: Job, generate: Callable[[list[int], int], Run]) -> Timed:
    """One request at a time: ``generate`` is called with each prompt and the new tokens."""
    *prompts, _probe = job.prompts
    warmups, new_tokens = job.workload.warmups, job.workload.new_tokens
    start = time.perf_counter()
    for prompt in prompts[:warmups]:
        generate(prompt, new_tokens)
    warmup_s = time.perf_counter() - start
    runs = [generate(prompt, new_tokens) for prompt in prompts[warmups:]]
    return Timed(warmup_s, peak_resident_bytes(), runs=runs)


def time_serving(job: Job, serve: Callable[[list[list[int]]], Serve]) -> Timed:
    """Many requests at once: ``serve`` is called with the prompts of each run."""
    warmup, *runs = job.requests
    start = time.perf_counter()
    serve(warmup)
    warmup_s = time.perf_counter() - start
    serves = [serve(prompts) for prompts in runs]
    return Timed(warmup_s, peak_resident_bytes(), serves=serves)
