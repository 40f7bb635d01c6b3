"""`mpitrain launch`: starts, supervises and reads the output of a job."""
