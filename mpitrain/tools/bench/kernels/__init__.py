"""Benchmarks of kernels: the operations of a training step, GEMM, and launch overhead."""
