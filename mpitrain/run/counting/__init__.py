"""Activations and FLOPs of a step, counted before the first step runs."""
