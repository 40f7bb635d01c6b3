"""`mpitrain slurm`: writes, submits and follows batch scripts for Slurm, PBS and LSF."""
