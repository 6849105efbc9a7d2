"""Built files that a later start finds again: compiled graphs and operators, by what made them."""

import functools
import hashlib
import json
import platform
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linnet.nest.sources import cache_root


def folder() -> Path:
    """Where they lie: ``$LINNET_HOME/torch``."""
    return cache_root() / "torch"


def key(**facts: Any) -> str:
    """A name that changes with any of the facts, with PyTorch, and with the processor."""
    facts |= {"torch": torch.__version__, "python": platform.python_version(), "cpu": _cpu()}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _cpu() -> str:
    """The instructions that the processor has: code for one may not run on another."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return f"{platform.machine()} {line.partition(':')[2].strip()}"
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def built(name: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """The file of a name, and whether it had to be built; it is whole or not there.

    ``build`` writes a path that it is given. Two processes that build the same file do no harm.
    """
    path = folder() / name
    if path.exists():
        return path, False
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.parent / f".{secrets.token_hex(8)}"
    work.mkdir()
    try:
        build(work / path.name)
        (work / path.name).replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path, True
