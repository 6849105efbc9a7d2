"""Benchmark methods: the PyTorch backend in each of its modes."""

from linnet.bench.sessions import SessionMethod


class Eager(SessionMethod):
    """The generated source, run as it is."""

    backend = "torch"
    mode = "eager"


class Inductor(SessionMethod):
    """Its compiled graphs."""

    backend = "torch"
    mode = "inductor"


class CudaGraphs(SessionMethod):
    """Its compiled graphs, the step replayed as one CUDA graph."""

    backend = "torch"
    mode = "cudagraphs"
