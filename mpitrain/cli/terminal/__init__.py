"""The terminal: standard output and error, progress bars and rows, and signals that stop a run."""
