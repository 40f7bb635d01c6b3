"""Runs CUDA kernels on the CPU: compiled by g++, one fiber a thread, with checks that a GPU does not make."""
