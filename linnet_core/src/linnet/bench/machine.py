"""The machine: what it is, how fast it reads memory, how much a process took."""

import os
import platform
import re
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("linnet", "torch", "transformers", "numpy", "jax", "onnxruntime")


NVIDIA = Path("/proc/driver/nvidia")
"""Where NVIDIA's driver says what it drives; it is there where it is loaded."""


def describe_machine(threads: int) -> dict[str, Any]:
    """Processors, cores, memory and system, as the system tells them."""
    return {
        **gpus(NVIDIA),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def has_gpu() -> bool:
    """Whether NVIDIA's driver is loaded."""
    return (NVIDIA / "version").exists()


def gpus(driver: Path) -> dict[str, str]:
    """``gpu``, the models with how many there are of each, and ``driver``, its version."""
    models: Counter[str] = Counter()
    for file in sorted(driver.glob("gpus/*/information")):
        found = re.search(r"^Model:\s*(\S.*?)\s*$", file.read_text(), re.MULTILINE)
        if found:
            models[found[1]] += 1
    named = [model if count == 1 else f"{count} x {model}" for model, count in models.items()]
    about = {"gpu": ", ".join(named)} if named else {}
    if (driver / "version").exists():
        version = re.search(r"Kernel Module.*?\s(\d+(\.\d+)+)\s", (driver / "version").read_text())
        about |= {"driver": version[1]} if version else {}
    return about


def versions() -> dict[str, str]:
    """Versions of what can take part, where it is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_bandwidth(threads: int, *, size: int = 128 << 20, repeats: int = 9) -> float:
    """Bytes per second that ``threads`` threads read from memory: the median of ``repeats``.

    Each thread takes the bitwise or of its own buffer of ``size`` bytes, which is larger than the
    caches: of NumPy's reductions it reads the fastest, and faster than a plain loop of loads. The
    best would be a moment's: where memory is shared with others, no row has it for a whole run.
    """
    buffers = [np.ones(size // 8, np.int64) for _ in range(threads)]
    speeds = []
    for _ in range(repeats):
        workers = [
            threading.Thread(target=np.bitwise_or.reduce, args=(buffer,)) for buffer in buffers
        ]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        speeds.append(size * threads / (time.perf_counter() - start))
    return statistics.median(speeds)


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    try:
        # Linux counts a parent's memory into ru_maxrss of the child it starts; not into this.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
