"""`mpitrain bench`: the commands that measure collectives, links, kernels and training steps."""
