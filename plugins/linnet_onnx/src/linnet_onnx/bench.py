"""Benchmark methods: the onnx backend."""

from linnet.bench.sessions import SessionMethod


class OnnxRuntime(SessionMethod):
    """One graph for prompt and step, its caches bound in place."""

    backend = "onnx"
    mode = "ort"
