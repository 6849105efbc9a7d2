"""The probe of an engine that cannot be made to decode given tokens, but says what it expected."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from linnet.plugins.benchmark import Job

Row = TypeVar("Row")


@dataclass
class Probe(Generic[Row]):
    """What an engine expected after the probe prompt and after each token of the reference's."""

    tokens: list[int] = field(default_factory=list)
    """``probe_tokens`` ids: the reference's, the engine's own where there is no reference."""
    rows: list[Row] = field(default_factory=list)
    """``probe_tokens + 1`` of whatever ``decode`` gives."""
    restarts: int = -1


def follow(job: Job, decode: Callable[[list[int], int], Iterable[tuple[int, Row]]]) -> Probe[Row]:
    """Decode after the probe prompt, and begin anew wherever the engine and the reference part.

    ``decode`` is called with a prompt and how many new tokens are wanted; it gives each token that
    the engine chooses, and what it expected there.
    """
    steps = job.workload.probe_tokens
    probe: Probe[Row] = Probe()
    while len(probe.rows) <= steps:
        probe.restarts += 1
        wanted = steps + 1 - len(probe.rows)
        for token, row in decode([*job.prompts[-1], *probe.tokens], wanted):
            probe.rows.append(row)
            if len(probe.rows) > steps:
                break
            probe.tokens.append(job.forced[len(probe.rows) - 1] if job.forced else token)
            if probe.tokens[-1] != token:
                break
    return probe


def follow_listed(
    job: Job, decode: Callable[[list[int], int], Iterable[tuple[int, Any]]]
) -> Probe[Any]:
    """Follow an engine that lists K likely tokens of each position, as ``(id, log-probability)``.

    They are saved as ids i64 and log-probabilities f64 ``[probe_tokens + 1, K]``.
    """
    probe = follow(job, decode)
    listed = np.array(probe.rows, np.float64)
    np.savez(
        Path(job.folder) / "probe.npz", ids=listed[..., 0].astype(np.int64), logprobs=listed[..., 1]
    )
    return probe
