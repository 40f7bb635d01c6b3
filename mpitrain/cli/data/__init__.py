"""`mpitrain data`, and its encoding of text on MPI ranks."""
