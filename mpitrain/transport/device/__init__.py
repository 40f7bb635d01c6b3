"""Messages of GPU memory: directly by a CUDA-aware MPI, or through pinned host memory."""
