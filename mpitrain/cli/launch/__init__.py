"""`mpitrain launch`: starts the ranks of a job, forwards its output, and decides its exit code."""
