"""Benchmarks of links: the latency and bandwidth of pairs of ranks."""
