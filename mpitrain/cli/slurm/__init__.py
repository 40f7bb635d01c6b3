"""`mpitrain slurm`: batch scripts, their submission, and the log of a job."""
