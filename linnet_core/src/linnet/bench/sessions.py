"""Measuring a Linnet session: what ``linnet generate`` runs, on the entries it runs."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linnet.bench.timing import time_runs
from linnet.plugins.benchmark import Job, Measurement, Run
from linnet.plugins.interfaces import LoadOptions, Session
from linnet.plugins.manager import plugin_manager
from linnet.runtime.load import bind
from linnet.spec.types import DType
from linnet.weights.binding import BoundModel


class SessionMethod:
    """A backend in one of its modes; subclasses name them."""

    backend: str
    mode: str

    def measure(self, job: Job) -> Measurement:
        """Load, warm up, time every run, then decode the probe with the reference's tokens."""
        workload = job.workload
        start = time.perf_counter()
        model = bind(job.model)
        manager = plugin_manager()
        session: Session = manager.implementation(manager.backend(self.backend)).load(
            model,
            LoadOptions(
                mode=self.mode,
                dtype=job.dtype,
                rows=1,
                max_seq=workload.context,
                threads=job.threads,
            ),
        )
        load_s = time.perf_counter() - start

        timed = time_runs(job, partial(generate, session))
        tokens, logits = probe(session, job.prompts[-1], job.forced, workload.probe_tokens)
        np.save(Path(job.folder) / "probe.npy", logits)
        granted = session.granted
        session.close()
        return Measurement(
            **vars(timed),
            load_s=load_s,
            granted=vars(granted),
            weight_bytes=self.weight_bytes(model, job),
            tokens=tokens,
        )

    def weight_bytes(self, model: BoundModel, job: Job) -> int:
        """What a step at the middle of a run must read; who encodes weights says it otherwise."""
        return step_bytes(model, job.dtype, job.workload.middle)


def vector(*values: int) -> Any:
    """An i32 vector."""
    return np.array(values, np.int32)


def generate(session: Session, prompt: list[int], new_tokens: int) -> Run:
    """One timed request. The clock starts with the ids and stops when each token is on the host."""
    tokens = np.array([prompt], np.int32)
    start = time.perf_counter()
    token = session.run(
        "extend_greedy",
        {"tokens": tokens, "rows": vector(0), "starts": vector(0), "lengths": vector(len(prompt))},
    )
    first = time.perf_counter()
    produced = [int(token[0])]
    for position in range(len(prompt), len(prompt) + new_tokens - 1):
        token = session.run("decode_greedy", {"tokens": token, "positions": vector(position)})
        produced.append(int(token[0]))
    return Run((first - start) * 1e3, time.perf_counter() - first, produced)


def probe(
    session: Session, prompt: list[int], forced: list[int] | None, steps: int
) -> tuple[list[int], Any]:
    """Logits after the prompt and after each of ``steps`` tokens: the given, or the likeliest."""
    where = {"rows": vector(0), "starts": vector(0), "lengths": vector(len(prompt))}
    rows = [session.run("extend", {"tokens": np.array([prompt], np.int32), **where})[0]]
    tokens = []
    for step in range(steps):
        tokens.append(forced[step] if forced else int(rows[-1].argmax()))
        position = vector(len(prompt) + step)
        rows.append(session.run("decode", {"tokens": vector(tokens[-1]), "positions": position})[0])
    return tokens, np.stack(rows)


def step_bytes(model: BoundModel, dtype: str, context: int) -> int:
    """What decoding one token must read: every weight but the unread rows of an embedding, and
    the keys and values of ``context`` positions.
    """
    program = model.program
    tied = {p.tied_to for p in program.parameters if p.tied_to}
    numbers = sum(
        int(np.prod(p.shape))
        for p in program.parameters
        if p.tied_to is None and (p.role != "embedding" or p.path in tied)
    )
    for state in program.states:
        numbers += context * int(np.prod([d for d in state.type.shape[2:] if isinstance(d, int)]))
    return numbers * DType(dtype).itemsize
