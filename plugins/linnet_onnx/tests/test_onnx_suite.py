"""The onnx backend against the suite that every backend passes."""

import pytest

from linnet.testing.backends import BackendSuite
from linnet_onnx.tensorrt import refusal


class TestOnnxRuntime(BackendSuite):
    backend = "onnx"
    modes = ("ort",)


@pytest.mark.skipif(refusal() is not None, reason=f"no TensorRT: {refusal()}")
class TestTensorRT(BackendSuite):
    backend = "onnx"
    modes = ("tensorrt",)
    tolerance = 1e-2
