"""A measuring process: ``python -m linnet.bench.child JOB`` runs one job and saves its result."""

import sys
from pathlib import Path

from linnet.plugins.benchmark import Job, Measurement
from linnet.plugins.manager import plugin_manager


def main(path: Path) -> None:
    """Run the job of a file; the result is ``result.json`` beside it."""
    job = Job.read(path)
    manager = plugin_manager()
    method = manager.implementation(manager.bench_method(job.method))
    measurement: Measurement = method.measure(job)
    measurement.save(path.with_name("result.json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
