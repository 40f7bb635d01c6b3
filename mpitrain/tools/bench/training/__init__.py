"""Benchmarks of training: time per step, comparison of modes, and PyTorch as a peer."""
