"""Collectives without our own messages: shared memory, CUDA IPC and MPI's all-reduce."""
