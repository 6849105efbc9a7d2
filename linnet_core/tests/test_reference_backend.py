"""The reference backend against the suite, and against Transformers where that is installed."""

from linnet.testing.backends import BackendSuite


class TestReference(BackendSuite):
    backend = "reference"
