"""The CUDA backend: our own kernels, on a GPU or in the simulator, with the signatures of
`reference`, in files of the same names.

No function here waits for the device. Numbers that `reference` returns are arrays here, without
dims or of two elements.
"""
