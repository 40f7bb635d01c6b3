"""Parallelism: the grid of ranks, and the ways in which several ranks train one model."""
