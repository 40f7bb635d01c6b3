"""The topology of a group of ranks: on which hosts they are, and what kind of arrays they reduce."""

from collections.abc import Sequence
from typing import NamedTuple


class Topology(NamedTuple):
    """Where arrays are to be reduced.

    hosts         host name of every rank
    is_native     whether MPI reduces the dtype
    is_on_device  whether the arrays lie in memory of a GPU
    """

    hosts: Sequence[str]
    dtype: str = "float32"
    is_native: bool = True
    is_on_device: bool = False
