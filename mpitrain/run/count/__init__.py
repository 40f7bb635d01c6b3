"""The activations and FLOPs of a step, counted before it runs; imported only where a step is counted."""
