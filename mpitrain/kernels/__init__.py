"""CUDA sources, the loader that compiles them, and the simulator that runs them on the CPU."""
