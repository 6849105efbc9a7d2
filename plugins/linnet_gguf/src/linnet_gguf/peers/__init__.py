"""Benchmark methods of engines that read GGUF, each in an environment of its own."""
