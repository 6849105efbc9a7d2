"""Going on with a benchmark that was interrupted: what of its file is kept."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import BenchError
from linnet.plugins.benchmark import Measurement
from linnet.weights.checkpoint import Array
from linnet.weights.paths import replacing

SAME = ("model", "workload", "machine", "versions")
"""What two benchmarks must agree in for their rows to stand in one table."""


def finished_rows(path: Path, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that were measured; those that failed are for another try.

    Raises BenchError for a file of another benchmark than ``results`` is to be.
    """
    try:
        found = json.loads(path.read_text())
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BenchError(f"{path} is no results file; name another, or delete it") from None
    if schema != results["schema"]:
        raise BenchError(f"{path} has the schema {schema!r}, not {results['schema']!r}: delete it")
    for part in SAME:
        there, here = found.get(part), json.loads(json.dumps(results[part]))
        if there != here:
            raise BenchError(
                f"{path} holds a benchmark of another {part} ({_difference(there, here)}); name "
                "another file, or delete it"
            )
    return [row for row in found["rows"] if row["error"] is None]


def _difference(there: Any, here: dict[str, Any]) -> str:
    if not isinstance(there, dict):
        return "it does not say which"
    return "; ".join(
        f"{key} {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    )


@dataclass(frozen=True)
class Reference:
    """What the reference gave: its greedy tokens after the probe prompt, and its logits.

    It lies beside the results file (``results.reference.npz``), so that rows which are measured
    later have what they are compared with.
    """

    tokens: list[int]
    logits: Array
    """f32 ``[probe_tokens + 1, vocab]``."""

    @staticmethod
    def of(measurement: Measurement, folder: Path) -> "Reference":
        """From the reference's own measurement."""
        return Reference(measurement.tokens, np.load(folder / "probe.npy"))

    def save(self, output: Path, results: dict[str, Any]) -> None:
        """Beside the results, with what they are results of."""
        with replacing(_beside(output)) as file:
            np.savez(file, tokens=self.tokens, logits=self.logits, of=_identity(results))

    @staticmethod
    def read(output: Path, results: dict[str, Any]) -> "Reference | None":
        """That of the same benchmark, or None."""
        try:
            with np.load(_beside(output), allow_pickle=False) as found:
                if str(found["of"]) == _identity(results):
                    return Reference(found["tokens"].tolist(), found["logits"])
        except (OSError, ValueError, KeyError):
            pass
        return None


def _identity(results: dict[str, Any]) -> str:
    return json.dumps({part: results[part] for part in SAME}, sort_keys=True)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.stem}.reference.npz")
