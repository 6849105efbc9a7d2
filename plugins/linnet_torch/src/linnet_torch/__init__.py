"""PyTorch for Linnet: readable source generated from a program, and a backend that runs it."""
