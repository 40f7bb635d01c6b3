"""The batch of a job: the largest and the fastest micro-batch, and the critical batch size."""
