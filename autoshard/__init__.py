"""Shard any JAX function over a device mesh: a solver chooses, XLA follows, a clock checks."""
