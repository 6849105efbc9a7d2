"""A measuring process: ``python -m linnet.bench.child STEP JOB`` takes one step of one job.

``prepare`` writes ``prepared.json`` beside the job's file, ``measure`` writes ``result.json``. A
failure with words of its own leaves them in ``failure.txt``.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from linnet.errors import LinnetError
from linnet.plugins.benchmark import Job, Measurement, Prepared
from linnet.plugins.manager import plugin_manager


def main(step: str, path: Path) -> None:
    """Take a step of the job of a file."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    job = Job.read(path)
    manager = plugin_manager()
    try:
        method = manager.implementation(manager.bench_method(job.method))
        if step == "prepare":
            prepared: Prepared = method.prepare(job)
            prepared.save(path.with_name("prepared.json"))
        else:
            measurement: Measurement = method.measure(job)
            measurement.save(path.with_name("result.json"))
    except LinnetError as error:
        path.with_name("failure.txt").write_text(str(error))
        raise


def end_with_parent() -> None:
    """Wait until the benchmark is gone, which closes our input; then end, with what we started.

    A process that went on measuring would spoil the timing of the next.
    """
    while os.read(0, 1):
        pass
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
