"""`mpitrain bench`: one file for each group of benchmarks."""
