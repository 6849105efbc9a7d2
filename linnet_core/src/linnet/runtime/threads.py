"""How many threads this process may use: what it may run on, not what the machine has.

A container's quota and a process's affinity are both smaller than the core count, and a pool
larger than either is slower, not faster. Knows nothing of who uses the number: every backend gets
the same one through ``LoadOptions.threads``.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from linnet.errors import RequestError

MOST = 1024
"""More threads than any machine here has cores; thread pools crash on absurd numbers."""


def thread_budget(
    option: int | None = None, *, root: Path = Path("/"), affinity: int | None = None
) -> int:
    """The number of threads to use: ``option`` if given, else the least of affinity and quota.

    ``root`` is where ``proc`` and ``sys`` are found; ``affinity`` is how many cores the process
    may run on, asked of the system when left out. Raises RequestError for an option that is
    not from 1 to ``MOST``.
    """
    if option is not None:
        if isinstance(option, bool) or not isinstance(option, int) or not (1 <= option <= MOST):
            raise RequestError(f"threads is {option!r}; it must be a whole number from 1 to {MOST}")
        return option
    cores = available_cores() if affinity is None else affinity
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def available_cores() -> int:
    """How many cores the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that control groups allow this process, None when unlimited.

    Reads cgroup v2 (``cpu.max``) and v1 (``cpu.cfs_quota_us``). A limit on any ancestor holds
    for the process too, so the tightest one counts.
    """
    limits = [limit for folder in _groups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Every folder whose limits apply: the process's own group and all those above it.

    Inside a container the group's path often does not exist below the mount, which then is the
    group itself; the mount is always among what is yielded.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [mount]
        elif "cpu" in controllers.split(","):
            mounts = [mount / controllers, mount / "cpu"]
        else:
            continue
        inside = PurePosixPath("/" + path.strip("/"))
        for base in mounts:
            for part in (inside, *inside.parents):
                if ".." not in part.parts:
                    yield base / part.relative_to("/")


def _limit(folder: Path) -> float | None:
    """The limit that one group states, in cores."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(folder / "cpu.cfs_quota_us").strip()
        period = _read(folder / "cpu.cfs_period_us").strip()
    try:
        used, whole = int(quota), int(period or 100_000)
    except ValueError:  # "max", or no such file
        return None
    return used / whole if used > 0 and whole > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
