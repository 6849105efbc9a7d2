"""KerasHub with many requests: static batches, which is all that its ``generate`` knows.

A batch is as many requests as may be in flight, in the order in which they come, each padded to
the longest request that there can be: one shape, compiled once. ``generate`` goes on until every
row is at its end, so what it makes beyond the new tokens that were asked for is not counted. No
token is there before the last: there is no time to a first one.
"""

import time

import numpy as np

from linnet.bench.timing import time_serving
from linnet.plugins.benchmark import Job, Measurement, Serve
from linnet_hf.peers.kerashub import KerasHub


class KerasHubStatic(KerasHub):
    """A KerasHub ``CausalLM`` that generates batch by batch."""

    def measure(self, job: Job) -> Measurement:
        """Load, compile, time every run, then decode the probe."""
        assert job.prepared is not None
        assert job.serving is not None
        serving = job.serving
        start = time.perf_counter()
        self.open(job)
        load_s = time.perf_counter() - start

        timed = time_serving(
            job,
            lambda prompts: self.serve(
                prompts, serving.new_tokens, serving.context, serving.in_flight
            ),
        )
        tokens = self.probe(job)
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted={**self.granted(), "rows": serving.in_flight},
            tokens=tokens,
            notes=["every batch runs to the longest possible prompt and its new tokens"],
        )

    def serve(self, prompts: list[list[int]], new_tokens: int, length: int, rows: int) -> Serve:
        """One timed run, of batches of ``rows`` requests."""
        tokens: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), rows):
            batch = prompts[first : first + rows]
            # Rows that are left over repeat the last request: an empty one would make the loop,
            # which begins where the shortest prompt ends, begin at its start.
            filled = [*batch, *[batch[-1]] * (rows - len(batch))]
            ids = np.zeros((rows, length), np.int32)
            for row, prompt in enumerate(filled):
                ids[row, : len(prompt)] = prompt
            lengths = np.array([len(prompt) for prompt in filled])
            mask = np.arange(length)[None] < lengths[:, None]
            output = self.model.generate(
                {"token_ids": ids, "padding_mask": mask}, stop_token_ids=None
            )
            made = np.asarray(output["token_ids"])
            tokens += [
                made[row, len(prompt) : len(prompt) + new_tokens].tolist()
                for row, prompt in enumerate(batch)
            ]
        return Serve(time.perf_counter() - start, [], tokens)
