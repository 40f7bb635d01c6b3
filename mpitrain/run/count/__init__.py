"""The activations and FLOPs of a step, counted before it runs; only jobs that are checked import this."""
