"""Benchmarks of collectives: sweeps over sizes, verification, tables, plots, and the fit of the cost model."""
