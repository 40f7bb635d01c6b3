"""Benchmarks of training: steps per second, comparison of modes, and PyTorch as a peer."""
