"""Layers: what a network is made of. They know nothing of ranks, own no arrays and keep no state."""
