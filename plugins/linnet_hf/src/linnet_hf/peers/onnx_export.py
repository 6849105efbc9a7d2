"""Letting a peer's own exporter run in a process of its own: its memory is not the peer's."""

import subprocess
import sys
from pathlib import Path

from linnet.errors import BenchError

CALL = (
    "import sys, importlib\n"
    "module, _, name = sys.argv[1].partition(':')\n"
    "getattr(importlib.import_module(module), name)(*sys.argv[2:])"
)


def in_process_of_its_own(target: str, *arguments: str | Path) -> None:
    """Call ``module:function`` with strings. Raises BenchError with the end of what it said."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, target, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise BenchError("its own export failed: " + "\n".join(said[-3:]))
