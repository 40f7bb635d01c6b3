"""Batch scripts on a real Slurm; `tests/slurm/run.sh` brings one up."""
