"""vLLM on a CPU, driven step by step in the process: no HTTP and no second process is timed.

vLLM gives its raw logits in place of log-probabilities when told so, and the distance is taken of
those. It cannot be made to decode given tokens on a CPU, so the probe follows vLLM's own choices,
and starts again with the reference's tokens as a prompt wherever the two part.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Run
from linnet_hf.peers.checkpoint import DTYPES, exported, original
from linnet_hf.peers.probe import Probe, follow

BLOCK = 128
"""Positions of a block of vLLM's cache on a CPU."""


class VLLM:
    """vLLM on a checkpoint that is not of Linnet's making."""

    def prepare(self, job: Job) -> Prepared:
        """The model's own folder."""
        return original(job)

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then ask for the logits of the probe."""
        assert job.prepared is not None
        workload = job.workload
        start = time.perf_counter()
        blocks = self.open(job, workload.context + 8, 1, workload.context + 8)
        load_s = time.perf_counter() - start

        timed = time_runs(job, self.generate)
        probe = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted=self.granted(),
            weight_bytes=job.prepared.weight_bytes,
            tokens=probe.tokens,
            notes=self.notes(blocks, probe.restarts),
        )

    def open(self, job: Job, length: int, rows: int, batched: int | None) -> int:
        """Make the engine for rows of a length; the blocks of its cache.

        ``batched`` is the most tokens of one step, vLLM's own choice where it is None.
        """
        assert job.prepared is not None
        cpus = sorted(os.sched_getaffinity(0))[: job.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(job.threads),
        }
        import torch
        from vllm import EngineArgs, LLMEngine

        torch.set_num_threads(job.threads)
        blocks = rows * -(-length // BLOCK) + 2
        self.engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=job.prepared.path,
                dtype=DTYPES[job.dtype],
                skip_tokenizer_init=True,
                max_model_len=length,
                max_num_seqs=rows,
                max_num_batched_tokens=batched,
                enable_prefix_caching=False,
                kv_cache_memory_bytes=blocks * BLOCK * self.position_bytes(job),
                max_logprobs=-1,
                logprobs_mode="raw_logits",
                seed=0,
            )
        )
        self.count = 0
        return blocks

    def granted(self) -> dict[str, Any]:
        """What the engine says of itself."""
        import torch

        config = self.engine.vllm_config
        return {
            "backend": "vllm",
            "mode": "in process",
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": str(config.device_config.device_type),
            "compilation": str(config.compilation_config.mode),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "rows": config.scheduler_config.max_num_seqs,
            "step_tokens": config.scheduler_config.max_num_batched_tokens,
            "threads": torch.get_num_threads(),
        }

    def notes(self, blocks: int, restarts: int) -> list[str]:
        """What stands beside the figures."""
        import torch

        return [
            f"torch {torch.__version__}",
            f"a cache of {blocks} blocks of {BLOCK} positions, as small as the workload "
            "allows; loading compiles, or finds what an earlier run compiled",
            f"the probe began anew {restarts} times, where vLLM chose another token",
        ]

    def position_bytes(self, job: Job) -> int:
        """Bytes that one position of the cache takes."""
        import json

        assert job.prepared is not None
        config = json.loads((Path(job.prepared.path) / "config.json").read_text())
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        numbers = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width
        return int(numbers) * (4 if job.dtype == "f32" else 2)

    def request(self, prompt: list[int], new_tokens: int, **options: Any) -> list[Any]:
        """Each output of a request as it comes, with the time when it came."""
        from vllm import SamplingParams

        self.count += 1
        settings = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **options
        )
        self.engine.add_request(str(self.count), {"prompt_token_ids": prompt}, settings)
        outputs = []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                outputs.append((time.perf_counter(), len(output.outputs[0].token_ids), output))
        return outputs

    def generate(self, prompt: list[int], new_tokens: int) -> Run:
        """One timed request. The clock starts with the ids, and each token is on the host."""
        start = time.perf_counter()
        outputs = self.request(prompt, new_tokens)
        (first, count, _), (last, _, output) = outputs[0], outputs[-1]
        if count != 1:
            raise BenchError(f"vLLM's first output has {count} tokens: there is no first token")
        if output.num_cached_tokens:
            raise BenchError(f"vLLM took {output.num_cached_tokens} tokens from a cache")
        return Run((first - start) * 1e3, last - first, list(output.outputs[0].token_ids))

    def probe(self, job: Job) -> Probe[Any]:
        """Save logits f32 ``[probe_tokens + 1, vocab]``."""

        def decode(prompt: list[int], wanted: int) -> Iterator[tuple[int, Any]]:
            completion = self.request(prompt, wanted, logprobs=-1)[-1][2].outputs[0]
            for token, listed in zip(completion.token_ids, completion.logprobs, strict=True):
                row = np.empty(len(listed), np.float32)
                for number, entry in listed.items():
                    row[number] = entry.logprob
                yield token, row

        probe = follow(job, decode)
        np.save(Path(job.folder) / "probe.npy", np.stack(probe.rows))
        return probe


class VLLMExport(VLLM):
    """vLLM on Linnet's export."""

    def prepare(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)
