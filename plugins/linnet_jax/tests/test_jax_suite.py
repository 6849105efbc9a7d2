"""The jax backend against the suite that every backend passes, in each of its modes."""

import pytest

from linnet.testing.backends import VARIANTS, BackendSuite


class TestJax(BackendSuite):
    """Each variant compiles a dozen programs, so the default suite has those that differ most."""

    backend = "jax"
    variants = ("f0", "biases", "window")


@pytest.mark.slow
class TestJaxEveryVariant(BackendSuite):
    backend = "jax"
    variants = tuple(name for name in VARIANTS if name not in TestJax.variants)
