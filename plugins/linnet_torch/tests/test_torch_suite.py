"""The torch backend against the suite that every backend passes."""

from linnet.testing.backends import BackendSuite


class TestTorch(BackendSuite):
    backend = "torch"
