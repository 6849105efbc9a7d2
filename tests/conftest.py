"""Fixtures of the tests that cross packages."""

from pathlib import Path

import pytest

from linnet.nest.sources import locate


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, from the first of its sources that can be reached; never skipped."""
    return locate("smollm2-135m-instruct", report=print)
