"""Blame: the first divergence of a hung or dead job, found in the traces of all its ranks."""
