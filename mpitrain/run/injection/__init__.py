"""Artificial failures of a run, for run.inject; imported only if the key is set."""
