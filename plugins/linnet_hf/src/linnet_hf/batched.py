"""Benchmark method: Transformers with many requests, by its own continuous batching.

Its manager runs in a thread and keeps a paged cache, whose size it would take from the memory that
is free; here it is as large as the workload needs. The distance is taken of the log-probabilities
of the tokens that it chooses, which a second manager of the same model gives.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from linnet.bench.timing import time_serving
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Serve
from linnet.runtime.load import bind
from linnet_hf.backend import load_model, versions
from linnet_hf.peers.probe import Probe, follow_listed

PAGE = 256
"""Positions of a page of its cache: its own default."""
PATIENCE_S = 600.0
"""Longest wait for a request to finish."""


class Batched:
    """Continuous batching over a paged cache."""

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then ask for the log-probabilities of the probe."""
        assert job.serving is not None
        serving = job.serving
        torch.set_num_threads(job.threads)
        start = time.perf_counter()
        bound = bind(job.model)
        self.model: Any = load_model(bound, job.dtype, attention="sdpa")
        pages = serving.in_flight * (-(-serving.context // PAGE) + 1)
        with self.manager(pages, serving.in_flight) as manager:
            load_s = time.perf_counter() - start
            timed = time_serving(
                job,
                lambda prompts: self.serve(manager, prompts, serving.new_tokens, serving.in_flight),
            )
            attention = self.model.config._attn_implementation
        probe = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={
                "backend": "transformers",
                "mode": "continuous batching",
                "dtype": job.dtype,
                "device": str(self.model.device),
                "attention": attention,
                "rows": serving.in_flight,
                "threads": torch.get_num_threads(),
            },
            tokens=probe.tokens,
            notes=[
                *versions(),
                f"{attention} attention, a cache of {pages} pages of {PAGE} positions",
                f"the probe began anew {probe.restarts} times, where another token was chosen",
            ],
        )

    @contextmanager
    def manager(self, pages: int, rows: int, *, logprobs: bool = False) -> Iterator[Any]:
        """A manager that runs, with prefix sharing off and no end of text."""
        chosen = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_requests_per_batch=rows,
            allow_block_sharing=False,
            return_logprobs=logprobs,
        )
        manager = self.model.init_continuous_batching(
            generation_config=chosen, continuous_batching_config=settings
        )
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True)

    def serve(
        self, manager: Any, prompts: list[list[int]], new_tokens: int, in_flight: int
    ) -> Serve:
        """One timed run; a request is given to the manager as soon as there is place for it."""
        waiting = list(enumerate(prompts))[::-1]
        tokens: dict[int, list[int]] = {}
        waits: dict[int, float] = {}
        numbers: dict[str, int] = {}
        given: dict[int, float] = {}
        start = time.perf_counter()
        while len(tokens) < len(prompts):
            while waiting and len(given) - len(tokens) < in_flight:
                number, prompt = waiting.pop()
                given[number] = time.perf_counter()
                name = manager.add_request(
                    prompt, max_new_tokens=new_tokens, record_timestamps=True
                )
                if name is None:
                    raise BenchError("Transformers' manager takes no more requests")
                numbers[name] = number
            result = finished(manager)
            number = numbers[result.request_id]
            tokens[number] = list(result.generated_tokens)
            waits[number] = (result.timestamps[0] - given[number]) * 1e3
        seconds = time.perf_counter() - start
        order = range(len(prompts))
        return Serve(seconds, [waits[n] for n in order], [tokens[n] for n in order])

    def probe(self, job: Job) -> Probe[Any]:
        """Save ids and log-probabilities ``[probe_tokens + 1, 1]``: of the tokens it chooses."""
        pages = -(-job.workload.context // PAGE) + 1
        with self.manager(pages, 1, logprobs=True) as manager:

            def decode(prompt: list[int], wanted: int) -> Iterator[tuple[int, Any]]:
                manager.add_request(prompt, max_new_tokens=wanted)
                result = finished(manager)
                for token, logprob in zip(result.generated_tokens, result.logprobs, strict=True):
                    yield token, [(token, logprob)]

            return follow_listed(job, decode)


def finished(manager: Any) -> Any:
    """The next request that is done. Raises BenchError where none is, or where it failed."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise BenchError("Transformers' manager stopped")
        if result is not None and result.error:
            raise BenchError(f"Transformers' manager failed: {result.error}")
        if result is not None and result.is_finished():
            return result
    raise BenchError(f"no request was done within {PATIENCE_S:.0f} s")
