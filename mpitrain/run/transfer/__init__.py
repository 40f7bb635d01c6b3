"""Models that a run starts from or that leave it: keys, initial parameters, exports."""
