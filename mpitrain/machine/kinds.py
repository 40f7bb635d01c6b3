"""The kinds of device: whatever else says one by one what they are, or what each has, is checked against this list."""

from typing import Literal, get_args

Kind = Literal["cpu", "cuda", "cuda-sim"]
"""cpu: NumPy; cuda: our kernels on a GPU, through CuPy; cuda-sim: the same kernels, compiled for the CPU."""

KINDS: tuple[Kind, ...] = get_args(Kind)
