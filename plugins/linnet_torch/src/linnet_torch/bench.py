"""Benchmark methods: the PyTorch backend in each of its modes."""

from linnet.bench.sessions import SessionMethod


class Eager(SessionMethod):
    """The generated source, run as it is."""

    backend = "torch"
    mode = "eager"
