"""GGUF checkpoints for Linnet, read into the Transformers dialect."""
