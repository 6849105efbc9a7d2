"""ONNX Runtime GenAI, on what its own model builder makes of the checkpoint.

Building is not timed. The end of text is put off by ``min_length``, which forbids it.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run
from linnet_hf.peers.checkpoint import own_or_exported
from linnet_hf.peers.onnx_export import in_process_of_its_own

PRECISIONS = {"f32": "fp32", "int4": "int4"}


class OrtGenAI:
    """``Generator`` of ONNX Runtime GenAI on a CPU."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own folder, or Linnet's export in f32: the builder makes int4 of that."""
        return own_or_exported(job, dtype="f32")

    def measure(self, job: Job) -> Measurement:
        """Build, load, warm up, time every run, then decode the probe."""
        assert job.prepared is not None
        workload = job.workload
        os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(job.threads)}
        folder = Path(job.folder) / "genai"
        in_process_of_its_own(
            "linnet_hf.peers.ort_genai:build", job.prepared.path, folder, PRECISIONS[job.dtype]
        )
        settings = folder / "genai_config.json"
        config = json.loads(settings.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job.threads
        settings.write_text(json.dumps(config))
        self.context = workload.context + 1

        start = time.perf_counter()
        import onnxruntime_genai

        self.genai: Any = onnxruntime_genai
        self.model: Any = onnxruntime_genai.Model(str(folder))
        load_s = time.perf_counter() - start

        timed = time_runs(job, self.generate)
        tokens, logits = self.probe(job.prompts[-1], job.forced, workload.probe_tokens)
        np.save(Path(job.folder) / "probe.npy", logits)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={
                "backend": "onnxruntime-genai",
                "mode": f"builder, {PRECISIONS[job.dtype]}",
                "dtype": job.dtype,
                "device": str(self.model.device_type),
                "threads": job.threads,
            },
            # What int4 must read cannot be told from the file: an embedding may lie there twice.
            weight_bytes=job.prepared.weight_bytes if job.dtype == "f32" else None,
            tokens=tokens,
            notes=[
                f"the builder's own {PRECISIONS[job.dtype]} model, built before the clock started",
                "end of text put off by min_length",
            ],
        )

    def generator(self, prompt_tokens: int, new_tokens: int) -> Any:
        """A generator of a fixed number of tokens."""
        length = prompt_tokens + new_tokens
        settings = self.genai.GeneratorParams(self.model)
        settings.set_search_options(
            do_sample=False, max_length=max(length, self.context), min_length=length, batch_size=1
        )
        return self.genai.Generator(self.model, settings)

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request."""
        start = time.perf_counter()
        generator = self.generator(len(prompt), new_tokens)
        generator.append_tokens(np.array(prompt, np.int32))
        generator.generate_next_token()
        tokens = [int(generator.get_next_tokens()[0])]
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return Run((first - start) * 1e3, time.perf_counter() - first, tokens)

    def probe(
        self, prompt: list[int], forced: list[int] | None, steps: int
    ) -> tuple[list[int], Any]:
        """Logits f32 ``[steps + 1, V]``: after the prompt, and after each token."""
        generator = self.generator(len(prompt), steps + 1)
        generator.append_tokens(np.array(prompt, np.int32))
        rows = [last(generator.get_logits())]
        tokens: list[int] = []
        for step in range(steps):
            tokens.append(forced[step] if forced else int(rows[-1].argmax()))
            generator.append_tokens(np.array(tokens[-1:], np.int32))
            rows.append(last(generator.get_logits()))
        return tokens, np.stack(rows)


def last(logits: Any) -> Any:
    """The logits f32 ``[V]`` of the last position of ``[1, S, V]``."""
    return np.array(logits, np.float32).reshape(-1, np.shape(logits)[-1])[-1]


def build(source: str, folder: str, precision: str) -> None:
    """GenAI's model builder on a Transformers folder, as its command line runs it."""
    places = ["-i", source, "-o", folder, "-c", f"{folder}-cache"]
    sys.argv = ["builder", *places, "-p", precision, "-e", "cpu"]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
