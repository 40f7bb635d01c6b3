"""Layers: the building blocks of a network. They know no ranks, own no arrays and have no state."""
