"""An engine in a process, and if need be an environment, of its own.

An engine is a script that imports nothing of Linnet. It is run as ``PYTHON SCRIPT FOLDER``:
``FOLDER`` holds ``request.json`` (``model``: the path of the artifact; ``tokens``: ids; ``texts``;
``threads``), and the script leaves ``answer.json`` (``versions``; ``ids``: for each text) and
``answer.npz`` beside it: either ``logits`` f32 ``[S, V]``, or for each position the ``ids`` and
``logprobs`` ``[S, K]`` of the likeliest tokens.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from linnet.errors import UnavailableError
from linnet.nest.sources import cache_root
from linnet.weights.checkpoint import Array

TIMEOUT_S = 1800


@dataclass(frozen=True)
class Engine:
    """An engine: the script that runs it, and the module that the script needs."""

    name: str
    script: Path
    module: str

    def python(self, asked: str | Path | None = None) -> Path:
        """The interpreter that has the engine.

        The one asked for, or that of ``LINNET_NAME_PYTHON``, or of ``linnet bench setup NAME``, or
        this one. Raises UnavailableError where none has it.
        """
        variable = f"LINNET_{self.name.upper()}_PYTHON"
        named = asked or os.environ.get(variable)
        if named:
            path = Path(named)
            if not path.is_file():
                raise UnavailableError(f"{path}, which is to run {self.name}, does not exist")
            return path
        made = cache_root() / "environments" / self.name
        if (made / "environment.json").is_file():
            return made / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if find_spec(self.module) is not None:
            return Path(sys.executable)
        raise UnavailableError(
            f"{self.name} is not installed here: make its environment with `linnet bench setup "
            f"{self.name}`, or set {variable} to a Python that has the module {self.module}"
        )


def verifier(options: Mapping[str, Any], engines: Mapping[str, Engine]) -> Engine | None:
    """The engine that an exporter's option ``verify`` asks for; the first one where it is true.

    Raises UnavailableError for one that the exporter does not run, or that is not installed:
    before anything is written.
    """
    asked = options.get("verify")
    if asked in (None, False):
        return None
    name = next(iter(engines)) if asked is True else asked
    if name not in engines:
        raise UnavailableError(
            f"verify is {asked!r}; this exporter can run {', '.join(engines)} on what it writes"
        )
    engines[name].python(options.get("engine_python"))
    return engines[name]


@dataclass(frozen=True)
class Answer:
    """What an engine gave: logits ``[S, V]``, or listed ids and log-probabilities ``[S, K]``."""

    versions: str
    ids: list[list[int]]
    logits: Array | None
    listed: tuple[Array, Array] | None


def ask(
    engine: Engine,
    model: Path,
    tokens: Sequence[int],
    texts: Sequence[str],
    *,
    threads: int,
    python: str | Path | None = None,
) -> Answer:
    """Run an engine on an artifact. Raises UnavailableError with the end of what it said."""
    interpreter = engine.python(python)
    with tempfile.TemporaryDirectory(prefix="linnet-verify-") as made:
        folder = Path(made)
        request = {
            "model": str(model.absolute()),
            "tokens": [int(token) for token in tokens],
            "texts": list(texts),
            "threads": threads,
        }
        (folder / "request.json").write_text(json.dumps(request))
        done = _run([str(interpreter), str(engine.script), made], threads)
        answer = folder / "answer.json"
        if done.returncode or not answer.exists():
            last = "\n".join(done.stderr.strip().splitlines()[-5:]) or "it said nothing"
            raise UnavailableError(
                f"{engine.name} ended with status {done.returncode} on {model}: {last}"
            )
        content: Mapping[str, Any] = json.loads(answer.read_text())
        with np.load(folder / "answer.npz") as arrays:
            found = {name: arrays[name] for name in arrays.files}
    listed = (found["ids"], found["logprobs"]) if "ids" in found else None
    return Answer(content["versions"], content["ids"], found.get("logits"), listed)


def _run(command: list[str], threads: int) -> subprocess.CompletedProcess[str]:
    # What is set for this process's Python would be read by the other's.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment = {**kept, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{command[1]} did not finish within {TIMEOUT_S} s") from None
