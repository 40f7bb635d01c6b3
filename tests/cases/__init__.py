"""What each kernel source must compute, case by case: functions of a `Kernels` that raise if it does not.

The tests run them in both builds of the simulator and several orders of threads; the mutation script runs them on broken
copies of the sources. Truth is NumPy or ops.reference in float64. Sizes: 1, around the tiles, primes, and empty.
"""
