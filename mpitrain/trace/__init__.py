"""Traces: each rank records its messages and compute in a file that survives a killed process."""
