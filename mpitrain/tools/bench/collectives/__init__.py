"""Benchmarks of collectives: sweeps, verification, tables, plots, and the fit of the cost model."""
