"""Tiny random checkpoints in the layouts in which the model families are published: for tests and benchmarks, not for ears."""
