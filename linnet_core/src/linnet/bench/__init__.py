"""Measuring: every method in a process of its own, on the same tokens, beside its distance."""
