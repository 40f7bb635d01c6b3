"""The topology of a group of ranks: their hosts, and the kind of the arrays that they reduce."""

from collections.abc import Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """Hosts of the ranks and type of their arrays: the properties that algorithms depend on.

    hosts         host name of every rank
    dtype         name of the elements' NumPy dtype
    is_native     whether MPI reduces the dtype
    is_on_device  whether the arrays are in GPU memory
    """

    hosts: Sequence[str]
    dtype: str = "float32"
    is_native: bool = True
    is_on_device: bool = False
