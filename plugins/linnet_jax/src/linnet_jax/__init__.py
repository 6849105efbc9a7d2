"""JAX for Linnet: generated jax.numpy source, and StableHLO written from the program."""
