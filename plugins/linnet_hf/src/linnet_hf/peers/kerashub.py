"""KerasHub on its JAX backend: ``generate`` as its users run it, one compiled loop for the whole.

Such a loop gives no token before the last. The time to the first token is that of a call for one
token, and decoding is what a call for all of them takes more; both are compiled before. KerasHub
computes the prompt at the length of prompt and new tokens together.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run
from linnet_hf.peers.checkpoint import DTYPES, own_or_exported


class KerasHub:
    """A KerasHub ``CausalLM`` from a Transformers folder, without its preprocessor."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own Transformers folder, or Linnet's export."""
        return own_or_exported(job)

    def measure(self, job: Job) -> Measurement:
        """Load, compile, warm up, time every run, then decode the probe."""
        assert job.prepared is not None
        start = time.perf_counter()
        self.open(job)
        load_s = time.perf_counter() - start

        timed = time_runs(job, self.generate)
        tokens = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted=self.granted(),
            weight_bytes=job.prepared.weight_bytes,
            tokens=tokens,
            notes=["first token: a call for one token; decoding: a call for all, less that"],
        )

    def open(self, job: Job) -> None:
        """Load the model."""
        assert job.prepared is not None
        if len(os.sched_getaffinity(0)) > job.threads:  # XLA has a thread for each it may use
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
        os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        import keras_hub

        self.model: Any = keras_hub.models.CausalLM.from_preset(
            job.prepared.path, dtype=DTYPES[job.dtype], preprocessor=None
        )
        self.model.compile(sampler="greedy")

    def granted(self) -> dict[str, Any]:
        """What runs."""
        import keras

        return {
            "backend": "kerashub",
            "mode": f"generate on {keras.backend.backend()}",
            "dtype": self.model.backbone.dtype_policy.name,
            "device": "cpu",
            "threads": len(os.sched_getaffinity(0)),
        }

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request, as two calls."""
        start = time.perf_counter()
        self.call(prompt, 1)
        first = time.perf_counter()
        tokens = self.call(prompt, new_tokens)
        whole = time.perf_counter() - first
        return Run((first - start) * 1e3, whole - (first - start), tokens)

    def call(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The new tokens of ``generate``, which fills a row of ids up to its end."""
        length = len(prompt) + new_tokens
        ids = np.zeros((1, length), np.int32)
        ids[0, : len(prompt)] = prompt
        inputs = {"token_ids": ids, "padding_mask": np.arange(length)[None] < len(prompt)}
        output = self.model.generate(inputs, stop_token_ids=None)
        return [int(token) for token in np.asarray(output["token_ids"])[0, len(prompt) :]]

    def probe(self, job: Job) -> list[int]:
        """Save logits f32 ``[probe_tokens + 1, vocab]``, of the calls that ``generate`` makes."""
        import jax
        import jax.numpy as jnp
        import keras

        model, prompt, steps = self.model, job.prompts[-1], job.workload.probe_tokens
        length = len(prompt) + job.workload.new_tokens
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        values = [variable.value for variable in variables]

        def scoped(function: Any) -> Any:
            def call(values: Any, *inputs: Any) -> Any:
                with keras.StatelessScope(state_mapping=zip(variables, values, strict=True)):
                    return function(*inputs)

            return jax.jit(call)

        @scoped
        def seed(ids: Any) -> Any:
            return model._build_cache(ids)[1]

        @scoped
        def step(token: Any, cache: Any, index: Any) -> Any:
            logits, _, cache = model.call_with_cache(token, cache, index)
            return logits[0, 0].astype(jnp.float32), cache

        ids = np.zeros((1, max(length, len(prompt) + steps + 1)), np.int32)
        ids[0, : len(prompt)] = prompt
        cache = seed(values, ids)
        rows: list[Any] = []
        tokens: list[int] = []
        for number in range(steps + 1):
            # As in generate: the prompt's last token is computed once more, and gives the first.
            token = tokens[-1] if tokens else prompt[-1]
            where = jnp.int32(len(prompt) - 1 + number)
            logits, cache = step(values, np.array([[token]], np.int32), cache, where)
            rows.append(np.asarray(logits))
            if number < steps:
                tokens.append(job.forced[number] if job.forced else int(rows[-1].argmax()))
        np.save(Path(job.folder) / "probe.npy", np.stack(rows))
        return tokens
