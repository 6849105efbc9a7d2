"""Fixtures of the tests that cross packages."""

from pathlib import Path

import pytest

from linnet.errors import UnavailableError
from linnet.nest.sources import locate
from linnet.verification.engine import Engine
from linnet_gguf.export import LLAMACPP
from linnet_hf.export import ENGINES


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, from the first of its sources that can be reached; never skipped."""
    return locate("smollm2-135m-instruct", report=print)


def installed(engine: Engine) -> Engine:
    """The engine, or a skip that says how to install it."""
    try:
        engine.python()
    except UnavailableError as error:
        pytest.skip(str(error))
    return engine


@pytest.fixture(scope="session")
def llamacpp() -> Engine:
    """llama.cpp, where it is installed."""
    return installed(LLAMACPP)


@pytest.fixture(scope="session")
def vllm() -> Engine:
    """vLLM, where it is installed."""
    return installed(ENGINES["vllm"])


@pytest.fixture(scope="session")
def sglang() -> Engine:
    """SGLang, where it is installed."""
    return installed(ENGINES["sglang"])
