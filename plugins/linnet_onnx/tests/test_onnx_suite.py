"""The onnx backend against the suite that every backend passes."""

from linnet.testing.backends import BackendSuite


class TestOnnxRuntime(BackendSuite):
    backend = "onnx"
    modes = ("ort",)
