"""SGLang, driven through its engine in Python: no HTTP is timed.

Its scheduler is a process of its own, as it always is; what passes between the two is timed.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from linnet.bench.timing import Timed, time_runs, time_serving
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run, Serve
from linnet_hf.peers.checkpoint import DTYPES, exported, original
from linnet_hf.peers.probe import Probe, follow_listed

LISTED = 1024
"""Likeliest tokens of a position that the distance is taken of."""
SPARE = 8
"""Positions beyond a request's own: SGLang keeps some for itself."""


class SGLang:
    """SGLang on a checkpoint that is not of Linnet's making."""

    options: Mapping[str, Any] = {"device": "cuda"}
    """SGLang's own choices but for the device: its kernels for processors need AMX and a build of
    their own."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own folder."""
        return original(job)

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then ask for what the probe's positions expected."""
        assert job.prepared is not None
        start = time.perf_counter()
        self.open(job, job.workload.context + SPARE, 1)
        load_s = time.perf_counter() - start
        timed = time_runs(job, self.generate)
        return self.measured(job, timed, load_s, job.prepared.weight_bytes)

    def open(self, job: Job, length: int, rows: int) -> None:
        """Start the engine for rows of a length, with a pool of no more tokens than they take."""
        assert job.prepared is not None
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(job.threads)}
        import sglang

        self.engine: Any = sglang.Engine(
            model_path=job.prepared.path,
            dtype=DTYPES[job.dtype],
            skip_tokenizer_init=True,
            context_length=length,
            max_running_requests=rows,
            max_total_tokens=rows * length,
            disable_radix_cache=True,
            random_seed=0,
            log_level="error",
            **self.options,
        )

    def measured(
        self, job: Job, timed: Timed, load_s: float, weight_bytes: int | None = None
    ) -> Measurement:
        """All that is told of a row; the engine is asked for the probe, and ended."""
        arguments = self.engine.server_args
        peak_bytes, memory = pool_memory()
        probe = self.probe(job)
        self.engine.shutdown()
        return Measurement(
            **{**vars(timed), "peak_bytes": peak_bytes, "memory": memory},
            load_s=load_s,
            granted={
                "backend": "sglang",
                "mode": "engine in process, scheduler beside it",
                "dtype": str(arguments.dtype),
                "device": str(arguments.device),
                "attention": str(arguments.attention_backend),
                "sampling": str(arguments.sampling_backend),
                "prefix_caching": not arguments.disable_radix_cache,
                "rows": arguments.max_running_requests,
            },
            weight_bytes=weight_bytes,
            tokens=probe.tokens,
            notes=[
                f"a pool of {arguments.max_total_tokens} tokens, as small as the workload allows; "
                "loading captures CUDA graphs",
                f"the probe began anew {probe.restarts} times, where SGLang chose another token",
            ],
        )

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request. The clock starts with the ids, and each token is on the host."""
        start = time.perf_counter()
        first = 0.0
        for answer in self.engine.generate(
            input_ids=prompt, sampling_params=greedy(new_tokens), stream=True
        ):
            if not first:
                first = time.perf_counter()
                check(answer, prompt)
                if answer["meta_info"]["completion_tokens"] != 1:
                    raise BenchError(
                        f"SGLang's first output has {answer['meta_info']['completion_tokens']} "
                        "tokens: there is no first token"
                    )
        return Run((first - start) * 1e3, time.perf_counter() - first, answer["output_ids"])

    def probe(self, job: Job) -> Probe[Any]:
        """Save the likeliest ids and their log-probabilities ``[probe_tokens + 1, K]``."""
        assert job.prepared is not None
        config = json.loads((Path(job.prepared.path) / "config.json").read_text())
        listed_tokens = min(LISTED, config["vocab_size"])

        def decode(prompt: list[int], wanted: int) -> Iterator[tuple[int, Any]]:
            answer = self.engine.generate(
                input_ids=prompt,
                sampling_params=greedy(wanted),
                return_logprob=True,
                top_logprobs_num=listed_tokens,
            )
            listed = answer["meta_info"]["output_top_logprobs"]
            for token, row in zip(answer["output_ids"], listed, strict=True):
                yield token, [(number, logprob) for logprob, number, _ in row]

        return follow_listed(job, decode)


class SGLangExport(SGLang):
    """SGLang on Linnet's export."""

    def prepare(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)


class ServeSGLang(SGLang):
    """SGLang with many requests in flight, batching as it likes."""

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then ask for what the probe's positions expected."""
        assert job.serving is not None
        serving, workload = job.serving, job.workload
        start = time.perf_counter()
        self.open(job, max(serving.context, workload.context) + SPARE, serving.in_flight)
        load_s = time.perf_counter() - start
        timed = time_serving(
            job, lambda prompts: self.serve(prompts, serving.new_tokens, serving.in_flight)
        )
        return self.measured(job, timed, load_s)

    def serve(self, prompts: list[list[int]], new_tokens: int, in_flight: int) -> Serve:
        """One timed run; a request is given to the engine as soon as there is place for it."""

        async def request(prompt: list[int], places: asyncio.Semaphore) -> tuple[float, list[int]]:
            async with places:
                given = time.perf_counter()
                first = 0.0
                async for answer in await self.engine.async_generate(
                    input_ids=prompt, sampling_params=greedy(new_tokens), stream=True
                ):
                    if not first:
                        first = time.perf_counter()
                        check(answer, prompt)
                return (first - given) * 1e3, answer["output_ids"]

        async def every() -> list[tuple[float, list[int]]]:
            places = asyncio.Semaphore(in_flight)
            return await asyncio.gather(*(request(prompt, places) for prompt in prompts))

        start = time.perf_counter()
        done = self.engine.loop.run_until_complete(every())
        seconds = time.perf_counter() - start
        return Serve(seconds, [wait for wait, _ in done], [tokens for _, tokens in done])


class ServeSGLangExport(ServeSGLang):
    """The same on Linnet's export."""

    def prepare(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)


def greedy(new_tokens: int) -> dict[str, Any]:
    """SGLang's settings for a fixed number of the likeliest tokens, with nothing added."""
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def check(answer: dict[str, Any], prompt: list[int]) -> None:
    """Raise BenchError for a prompt that was cut, or was not computed."""
    about = answer["meta_info"]
    if about["prompt_tokens"] != len(prompt):
        raise BenchError(f"SGLang read {about['prompt_tokens']} of {len(prompt)} prompt tokens")
    if about["cached_tokens"]:
        raise BenchError(f"SGLang took {about['cached_tokens']} tokens from a cache")


def pool_memory() -> tuple[int, str]:
    """What this process and its children hold: of the GPU, by its driver; without one, resident.

    SGLang takes all that it needs when it starts, so what it holds now is its peak.
    """
    import psutil
    import torch

    this = psutil.Process()
    family = [this, *this.children(recursive=True)]
    if not torch.cuda.is_available():
        return sum(process.memory_info().rss for process in family), "resident"
    import pynvml

    pynvml.nvmlInit()
    ours = {process.pid for process in family}
    held = 0
    for number in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            held += (process.usedGpuMemory or 0) if process.pid in ours else 0
    return held, "driver"
