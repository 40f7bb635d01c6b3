"""Layers that save memory: recomputed activations, and logits in slices of rows."""
