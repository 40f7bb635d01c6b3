"""Collectives without messages of ours: shared memory, CUDA IPC and MPI's own."""
