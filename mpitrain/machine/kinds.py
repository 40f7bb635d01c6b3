"""The kinds of device; all lists and tables by kind elsewhere are checked against this one."""

from typing import Literal, get_args

Kind = Literal["cpu", "cuda", "cuda-sim"]
"""cpu: NumPy; cuda: our kernels on a GPU, through CuPy; cuda-sim: the same kernels compiled for the
CPU.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
