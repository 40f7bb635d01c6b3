"""Failed MPI calls and lost peers, as errors of mpitrain."""
