"""Benchmarks of kernels: operations of a training step, GEMM, and launch overhead."""
