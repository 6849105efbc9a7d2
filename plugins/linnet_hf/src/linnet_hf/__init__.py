"""Transformers for Linnet: the reference that every backend is compared with."""
