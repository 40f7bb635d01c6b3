"""Commands that read the metrics of runs."""
