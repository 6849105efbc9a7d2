"""Rows that every page has and that nothing measures yet, each with the reason."""

from typing import NoReturn

from linnet.errors import BenchError
from linnet.plugins.benchmark import Job


class Serve:
    """Linnet's own server."""

    def measure(self, job: Job) -> NoReturn:
        """Refuse. Raises BenchError."""
        raise BenchError("linnet.serve is not there yet: nothing was measured")


class Triton:
    """Triton Inference Server."""

    def measure(self, job: Job) -> NoReturn:
        """Refuse. Raises BenchError."""
        raise BenchError("Linnet exports nothing for Triton yet: nothing was measured")
