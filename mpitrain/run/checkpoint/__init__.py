"""Sharded checkpoints: written by all ranks, loaded in any layout, verified by SHA-256."""
