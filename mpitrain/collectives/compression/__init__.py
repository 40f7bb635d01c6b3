"""Gradient compression: quantized, top-k and low-rank all-reduce, with error feedback."""
