"""Checkpoints: written by all ranks, independent of the layout, verified by SHA-256."""
