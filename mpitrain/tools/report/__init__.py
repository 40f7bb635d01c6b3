"""Reports from a run's traces: breakdown of time, pictures, last known action of each rank."""
