"""Reports on runs: where the time went, pictures, what each rank did last, and the difference of two runs."""
