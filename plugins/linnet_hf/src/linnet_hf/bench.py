"""Benchmark methods: Transformers, as it comes and compiled.

Both run Transformers' own forward with its own cache and its default attention, and choose the
likeliest token on the device. The compiled one is what Transformers' guide to speed recommends: a
static cache and ``torch.compile`` of the forward.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from linnet.bench.sessions import step_bytes
from linnet.bench.timing import time_runs
from linnet.plugins.benchmark import Job, Measurement, Run
from linnet.runtime.load import bind
from linnet_hf.backend import load_model, versions


class Eager:
    """A dynamic cache, nothing compiled."""

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then decode the probe with the reference's tokens."""
        workload = job.workload
        torch.set_num_threads(job.threads)
        start = time.perf_counter()
        bound = bind(job.model)
        self.model = load_model(bound, job.dtype, attention="sdpa")
        self.context = workload.context
        self.prepare()
        load_s = time.perf_counter() - start

        with torch.inference_mode():
            timed = time_runs(job, self.generate)
            tokens, logits = self.probe(job.prompts[-1], job.forced, workload.probe_tokens)
        np.save(Path(job.folder) / "probe.npy", logits)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={
                "backend": "transformers",
                "mode": self.mode,
                "dtype": job.dtype,
                "device": str(self.model.device),
                "attention": self.model.config._attn_implementation,
                "threads": torch.get_num_threads(),
            },
            weight_bytes=step_bytes(bound, job.dtype, workload.middle),
            tokens=tokens,
            notes=versions(),
        )

    mode = "eager"

    def prepare(self) -> None:
        """Nothing to do."""

    def new_cache(self) -> Any:
        """An empty cache for one request."""
        return transformers.DynamicCache(config=self.model.config)

    def step(self, tokens: torch.Tensor, position: int, cache: Any) -> torch.Tensor:
        """Tokens ``[1, S]`` from a position on; the logits ``[V]`` that follow the last."""
        places = torch.arange(position, position + tokens.shape[1])
        output = self.model(
            input_ids=tokens,
            past_key_values=cache,
            position_ids=places[None],
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request; each token reaches the host before the next step."""
        cache = self.new_cache()
        start = time.perf_counter()
        token = int(self.step(torch.tensor([prompt]), 0, cache).argmax())
        first = time.perf_counter()
        tokens = [token]
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            token = int(self.step(torch.tensor([[token]]), position, cache).argmax())
            tokens.append(token)
        return Run((first - start) * 1e3, time.perf_counter() - first, tokens)

    def probe(
        self, prompt: list[int], forced: list[int] | None, steps: int
    ) -> tuple[list[int], Any]:
        """Logits f32 ``[steps + 1, V]``: after the prompt, and after each token."""
        cache = self.new_cache()
        rows = [self.step(torch.tensor([prompt]), 0, cache).float().numpy()]
        tokens = []
        for step in range(steps):
            tokens.append(forced[step] if forced else int(rows[-1].argmax()))
            logits = self.step(torch.tensor([[tokens[-1]]]), len(prompt) + step, cache)
            rows.append(logits.float().numpy().copy())
        return tokens, np.stack(rows)


class Compiled(Eager):
    """A static cache of the workload's length, and the forward compiled."""

    mode = "compiled"

    def prepare(self) -> None:
        """Compile the forward: once for prompts, once for steps."""
        self.model.forward = torch.compile(self.model.forward, dynamic=False)
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=self.context)

    def new_cache(self) -> Any:
        """The one cache, emptied: its tensors stay where the compiled code expects them."""
        self.cache.reset()  # type: ignore[no-untyped-call]
        return self.cache
