"""Benchmarks of collectives, links, kernels and training steps, and plots of losses."""
