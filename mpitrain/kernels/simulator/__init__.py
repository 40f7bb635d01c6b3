"""A simulator that runs CUDA kernels on the CPU, with checks that a GPU lacks.

g++ or zig compiles the kernels. Each thread of a kernel is a fiber.
"""
