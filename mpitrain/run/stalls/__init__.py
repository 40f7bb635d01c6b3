"""Stalls and stragglers of a run: questions to its ranks, one report of a stall, slow ranks."""
