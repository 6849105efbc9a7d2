"""vLLM with many requests in flight: its engine stepped in the process, batching as it likes.

No HTTP and no second process is timed. The probe is decoded by the same engine afterwards.
"""

import time

from linnet.bench.timing import time_serving
from linnet.errors import BenchError
from linnet.plugins.benchmark import Job, Measurement, Prepared, Serve
from linnet_hf.peers.checkpoint import exported
from linnet_hf.peers.vllm import VLLM


class ServeVLLM(VLLM):
    """vLLM on a checkpoint that is not of Linnet's making."""

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then ask for the logits of the probe."""
        assert job.prepared is not None
        assert job.serving is not None
        serving, workload = job.serving, job.workload
        start = time.perf_counter()
        # The longest request and the probe fit, and as many rows as are in flight.
        longest = max(serving.context, workload.context) + 8
        blocks = self.open(job, longest, serving.in_flight, None)
        load_s = time.perf_counter() - start

        timed = time_serving(
            job, lambda prompts: self.serve(prompts, serving.new_tokens, serving.in_flight)
        )
        probe = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted=self.granted(),
            tokens=probe.tokens,
            notes=self.notes(blocks, probe.restarts),
        )

    def serve(self, prompts: list[list[int]], new_tokens: int, in_flight: int) -> Serve:
        """One timed run; a request is given to the engine as soon as there is place for it."""
        from vllm import SamplingParams

        settings = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        tokens: dict[str, list[int]] = {}
        given: dict[str, float] = {}
        waits: dict[str, float] = {}
        waiting = [(f"{self.count}-{number}", prompt) for number, prompt in enumerate(prompts)]
        order = [name for name, _ in waiting]
        waiting.reverse()
        self.count += 1
        start = time.perf_counter()
        while len(tokens) < len(order):
            while waiting and len(given) - len(tokens) < in_flight:
                name, prompt = waiting.pop()
                given[name] = time.perf_counter()
                self.engine.add_request(name, {"prompt_token_ids": prompt}, settings)
            for output in self.engine.step():
                name, now = output.request_id, time.perf_counter()
                if output.outputs[0].token_ids and name not in waits:
                    waits[name] = (now - given[name]) * 1e3
                if output.num_cached_tokens:
                    raise BenchError(f"vLLM took {output.num_cached_tokens} tokens from a cache")
                if output.finished:
                    tokens[name] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        return Serve(seconds, [waits[name] for name in order], [tokens[name] for name in order])


class ServeVLLMExport(ServeVLLM):
    """vLLM on Linnet's export."""

    def prepare(self, job: Job) -> Prepared:
        """Linnet's Transformers checkpoint."""
        return exported(job)
