"""Optimum's ONNX Runtime model, from its own export, stepped with its own cache.

The export is made before the clock starts. Optimum copies the cache from step to step, as its
``generate`` does; choosing the token is a maximum on the host.
"""

import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run
from linnet_hf.peers.checkpoint import own_or_exported
from linnet_hf.peers.onnx_export import in_process_of_its_own


class OptimumOnnx:
    """``ORTModelForCausalLM`` on the CPU provider."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own Transformers folder, or Linnet's export."""
        return own_or_exported(job)

    def measure(self, job: Job) -> Measurement:
        """Export, load, warm up, time every run, then decode the probe."""
        assert job.prepared is not None
        workload = job.workload
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(job.threads)}
        folder = Path(job.folder) / "onnx"
        in_process_of_its_own("linnet_hf.peers.optimum_onnx:export", job.prepared.path, folder)

        start = time.perf_counter()
        import onnxruntime
        import torch
        from optimum.onnxruntime import ORTModelForCausalLM

        torch.set_num_threads(job.threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = job.threads
        self.torch: Any = torch
        self.model: Any = ORTModelForCausalLM.from_pretrained(
            folder, provider="CPUExecutionProvider", session_options=options
        )
        load_s = time.perf_counter() - start

        timed = time_runs(job, self.generate)
        tokens, logits = self.probe(job.prompts[-1], job.forced, workload.probe_tokens)
        np.save(Path(job.folder) / "probe.npy", logits)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={
                "backend": "optimum-onnx",
                "mode": "io binding" if self.model.use_io_binding else "no io binding",
                "dtype": job.dtype,
                "device": "cpu",
                "provider": ", ".join(self.model.providers),
                "threads": job.threads,
            },
            weight_bytes=job.prepared.weight_bytes,
            tokens=tokens,
            notes=[
                f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, "
                f"transformers {version('transformers')}",
                "Optimum's own export, made before the clock started",
            ],
        )

    def step(self, ids: list[int], position: int, cache: Any) -> tuple[Any, Any]:
        """Logits ``[V]`` after token ids from a position on, and the cache that holds them."""
        torch = self.torch
        output = self.model(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, position + len(ids), dtype=torch.int64),
            position_ids=torch.arange(position, position + len(ids))[None],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[0, -1], output.past_key_values

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request; each token reaches the host before the next step."""
        start = time.perf_counter()
        logits, cache = self.step(prompt, 0, None)
        tokens = [int(logits.argmax())]
        first = time.perf_counter()
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            logits, cache = self.step(tokens[-1:], position, cache)
            tokens.append(int(logits.argmax()))
        return Run((first - start) * 1e3, time.perf_counter() - first, tokens)

    def probe(
        self, prompt: list[int], forced: list[int] | None, steps: int
    ) -> tuple[list[int], Any]:
        """Logits f32 ``[steps + 1, V]``: after the prompt, and after each token."""
        logits, cache = self.step(prompt, 0, None)
        rows = [logits.float().numpy().copy()]
        tokens: list[int] = []
        for step in range(steps):
            tokens.append(forced[step] if forced else int(rows[-1].argmax()))
            logits, cache = self.step(tokens[-1:], len(prompt) + step, cache)
            rows.append(logits.float().numpy().copy())
        return tokens, np.stack(rows)


def export(source: str, folder: str) -> None:
    """Optimum's export of a Transformers folder, with a cache."""
    from optimum.exporters.onnx import main_export

    main_export(source, folder, task="text-generation-with-past", local_files_only=True)
