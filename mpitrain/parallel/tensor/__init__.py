"""Tensor parallelism: column-, row- and vocabulary-parallel layers, and sequence parallelism."""
