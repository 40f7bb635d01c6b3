"""Benchmarks of links: latency and bandwidth of pairs of ranks."""
