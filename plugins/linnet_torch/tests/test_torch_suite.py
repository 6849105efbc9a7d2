"""The torch backend against the suite that every backend passes, in each of its modes."""

import pytest
import torch

from linnet.testing.backends import VARIANTS, BackendSuite


class TestEager(BackendSuite):
    backend = "torch"
    modes = ("eager",)


class TestInductor(BackendSuite):
    """Each variant compiles four graphs, so the default suite has those that differ in kind."""

    backend = "torch"
    modes = ("inductor",)
    variants = ("f0", "biases", "window")


@pytest.mark.slow
class TestInductorEveryVariant(BackendSuite):
    backend = "torch"
    modes = ("inductor",)
    variants = tuple(name for name in VARIANTS if name not in TestInductor.variants)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is there")
class TestCudaGraphs(BackendSuite):
    backend = "torch"
    modes = ("cudagraphs",)
