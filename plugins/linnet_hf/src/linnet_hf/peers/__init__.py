"""Benchmark methods of engines that read Transformers checkpoints, in environments of their own."""
