"""Models for tests of the onnx plugin."""

import pytest

from linnet.testing.backends import bind
from linnet.weights.binding import BoundModel


@pytest.fixture
def f0() -> BoundModel:
    """Six heads over two key heads, f32."""
    return bind("f0")
