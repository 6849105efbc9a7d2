"""Engines that the page has rows for and that Linnet does not drive yet, each with the reason."""

from pathlib import Path
from typing import NoReturn

from linnet.errors import BenchError
from linnet.plugins.benchmark import Job

GPU = Path("/proc/driver/nvidia/version")
"""It is there where NVIDIA's driver is loaded."""


def refuse(engine: str, how: str) -> NoReturn:
    """Say why there is no row. Raises BenchError."""
    if GPU.exists():
        raise BenchError(f"{engine} is not driven by Linnet yet: nothing was measured")
    raise BenchError(f"{engine} needs a GPU, and this machine has none; {how}")


class SGLang:
    """SGLang, from its package."""

    def measure(self, job: Job) -> NoReturn:
        """Refuse."""
        refuse("SGLang", "nor is it driven by Linnet yet")


class TGI:
    """Text Generation Inference, which is published as a container."""

    def measure(self, job: Job) -> NoReturn:
        """Refuse."""
        refuse("TGI", "it also comes as a container only, which Linnet does not start yet")
