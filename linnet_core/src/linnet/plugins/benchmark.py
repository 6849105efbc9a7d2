"""What a benchmark method is told and tells: data alone, JSON both ways."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import BenchError


@dataclass(frozen=True)
class Workload:
    """One request at a time: a prompt of random tokens, then a fixed number of new ones.

    ``probe_tokens`` are decoded once more outside the clock, for the distance.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    runs: int = 10
    warmups: int = 3
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

    def prompts(self, vocab: int) -> list[list[int]]:
        """A prompt for each warm-up and run, the last for the probe; each starts differently."""
        count = self.warmups + self.runs + 1
        draw = np.random.default_rng(self.seed)
        prompts = draw.integers(0, vocab, (count, self.prompt_tokens))
        prompts[:, 0] = draw.permutation(vocab)[:count]
        return prompts.tolist()  # type: ignore[no-any-return]


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

    def save(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Job":
        """From JSON."""
        data = json.loads(path.read_text())
        prepared = data["prepared"] and Prepared(**data["prepared"])
        return Job(**{**data, "workload": Workload(**data["workload"]), "prepared": prepared})


@dataclass(frozen=True)
class Run:
    """One timed request: milliseconds to the first token, seconds for the others, all tokens."""

    ttft_ms: float
    decode_s: float
    tokens: list[int]


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

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        _save(asdict(self), path)

    @staticmethod
    def read(path: Path) -> "Measurement":
        """From JSON."""
        data = json.loads(path.read_text())
        return Measurement(**{**data, "runs": [Run(**run) for run in data["runs"]]})


def _save(data: dict[str, Any], path: Path) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(data))
    beside.replace(path)
