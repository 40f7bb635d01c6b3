"""`mpitrain launch`: starts a job, supervises it and reads its output."""
