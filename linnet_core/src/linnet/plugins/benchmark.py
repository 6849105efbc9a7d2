"""What a benchmark method is told and tells: data alone, JSON both ways."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import BenchError

LIMIT_S = 900.0
"""Seconds that each step of a row may take unless more is given."""


@dataclass(frozen=True)
class Workload:
    """One request at a time: a prompt of random tokens, then a fixed number of new ones.

    ``probe_tokens`` are decoded once more outside the clock, for the distance.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    runs: int = 5
    warmups: int = 2
    seed: int = 0
    probe_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "runs", "probe_tokens"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.new_tokens < 2:
            raise BenchError(f"new_tokens is {self.new_tokens}; decoding takes 2 or more")
        if self.warmups < 0:
            raise BenchError(f"warmups is {self.warmups}; it must be 0 or more")

    @property
    def context(self) -> int:
        """Positions a cache must hold."""
        return self.prompt_tokens + max(self.new_tokens, self.probe_tokens + 1)

    @property
    def middle(self) -> int:
        """Positions that a step reads halfway through a run: what its bytes are counted at."""
        return self.prompt_tokens + self.new_tokens // 2

    def prompts(self, vocab: int) -> list[list[int]]:
        """A prompt for each warm-up and run, the last for the probe; each starts differently."""
        count = self.warmups + self.runs + 1
        draw = np.random.default_rng(self.seed)
        prompts = draw.integers(0, vocab, (count, self.prompt_tokens))
        prompts[:, 0] = draw.permutation(vocab)[:count]
        return prompts.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Serving:
    """Many requests at once: prompts of random lengths, each with the same number of new tokens.

    ``in_flight`` are given to the engine before any is finished; each that finishes makes place
    for the next. One more run, of ``in_flight`` requests, warms up.
    """

    name: str
    requests: int
    min_prompt_tokens: int
    max_prompt_tokens: int
    new_tokens: int
    in_flight: int
    runs: int = 3
    seed: int = 0

    @property
    def context(self) -> int:
        """Positions that the longest request needs."""
        return self.max_prompt_tokens + self.new_tokens

    def prompts(self, vocab: int) -> list[list[list[int]]]:
        """The prompts of the warm-up and of each run; no two of them start alike.

        Every run has the same lengths, so that runs differ in nothing but their tokens.
        """
        draw = np.random.default_rng(self.seed)
        span = (self.min_prompt_tokens, self.max_prompt_tokens + 1)
        lengths = draw.integers(*span, self.requests)
        firsts = draw.permutation(vocab).tolist()
        if len(firsts) < self.in_flight + self.runs * self.requests:
            raise BenchError(
                f"{self.in_flight + self.runs * self.requests} prompts that start differently are "
                f"needed, but the model has {vocab} tokens"
            )
        return [
            [[firsts.pop(), *draw.integers(0, vocab, n - 1).tolist()] for n in some]
            for some in (lengths[: self.in_flight], *[lengths] * self.runs)
        ]


SERVING = {
    "standard": Serving("standard", 256, 128, 512, 128, 64),
    "small": Serving("small", 16, 32, 128, 32, 8),
}
"""The workload of the page, and one for machines that would take hours for it."""


@dataclass(frozen=True)
class Prepared:
    """What a peer reads, written for it by Linnet before its process starts.

    ``weight_bytes`` is as in ``Measurement``; ``notes`` are printed beside the row.
    """

    path: str
    weight_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        _save(asdict(self), path)

    @staticmethod
    def read(path: Path) -> "Prepared":
        """From JSON."""
        return Prepared(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Job:
    """What one process is told: which model, how, and where to put what it finds."""

    method: str
    model: str
    dtype: str
    threads: int
    workload: Workload
    prompts: list[list[int]]
    forced: list[int] | None
    """The reference's tokens after the probe prompt; None for the reference itself."""
    folder: str
    """An empty folder for this job's files."""
    prepared: Prepared | None = None
    """What ``prepare`` wrote, for a method in an environment of its own."""
    serving: Serving | None = None
    """The workload of a method that serves; the prompts of it are ``requests``."""
    requests: list[list[list[int]]] = field(default_factory=list)
    """A list of prompts for the warm-up, and one for each run."""
    limit_s: float = LIMIT_S
    """Seconds after which its process is ended, and the row has that as its reason."""

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Job":
        """From JSON."""
        data = json.loads(path.read_text())
        prepared = data["prepared"] and Prepared(**data["prepared"])
        serving = data["serving"] and Serving(**data["serving"])
        workload = Workload(**data["workload"])
        return Job(**{**data, "workload": workload, "prepared": prepared, "serving": serving})


@dataclass(frozen=True)
class Run:
    """One timed request: milliseconds to the first token, seconds for the others, all tokens."""

    ttft_ms: float
    decode_s: float
    tokens: list[int]


@dataclass(frozen=True)
class Serve:
    """One timed run of many requests, from the first that is given to the last that is done.

    ``ttft_ms`` has each request's wait from when it was given to its first token; it is empty
    from an engine that does not tell.
    """

    seconds: float
    ttft_ms: list[float]
    tokens: list[list[int]]
    """The new tokens of each request, in the order of the prompts."""


@dataclass(frozen=True)
class Measurement:
    """What one process tells.

    ``weight_bytes`` is what a decoding step must read at least: every weight once, and the cache
    at the middle of the run. ``peak_bytes`` is the process's own peak, resident unless
    ``memory`` says otherwise.

    What the distance is taken of lies in the job's folder: logits f32 ``[probe_tokens + 1,
    vocab]`` in ``probe.npy``; or, from an engine that gives no logits, ``probe.npz`` with integer
    ``ids`` and float ``logprobs`` ``[probe_tokens + 1, K]``, the K likeliest tokens of each
    position in nats.
    """

    runs: list[Run]
    load_s: float
    warmup_s: float
    peak_bytes: int
    memory: str
    granted: dict[str, Any]
    weight_bytes: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Greedy tokens after the probe prompt, where the method chose them itself."""
    notes: list[str] = field(default_factory=list)
    serves: list[Serve] = field(default_factory=list)
    """The runs of a method that serves, which has no ``runs``."""
    fixed_length: bool = True
    """False from an engine that cannot be kept from ending a text: the tokens that came count."""

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        _save(asdict(self), path)

    @staticmethod
    def read(path: Path) -> "Measurement":
        """From JSON."""
        data = json.loads(path.read_text())
        runs = [Run(**run) for run in data["runs"]]
        serves = [Serve(**serve) for serve in data["serves"]]
        return Measurement(**{**data, "runs": runs, "serves": serves})


def _save(data: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(data))
    beside.replace(path)
