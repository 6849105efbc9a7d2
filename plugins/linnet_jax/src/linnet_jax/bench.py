"""Benchmark methods: the JAX backend in each of its modes."""

from linnet.bench.sessions import SessionMethod


class Source(SessionMethod):
    """The generated source, compiled by XLA."""

    backend = "jax"
    mode = "jax"


class StableHLO(SessionMethod):
    """The StableHLO that is written from the program, compiled by XLA."""

    backend = "jax"
    mode = "stablehlo"
