"""Recorders of topics: each runs the package's code on symbols, and returns an explanation."""
