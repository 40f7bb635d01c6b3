"""How many blocks a launch gets, and what a block may have."""

from functools import cache

from mpitrain.kernels.loader import Kernels

POINTWISE = (256,)  # threads a block of the kernels that go element by element
ROWS = (128,)  # of those with one warp a row: four rows a block
WIDE_ROWS = (
    1024,
)  # of those with one block a row, where it is long: enough loads under way to use the memory's whole rate
MOST_BLOCKS = 2048  # of kernels that go round until nothing is left: enough to fill any GPU

# Bytes of shared memory that a block may have, by compute capability; the largest entry not above a device's counts.
SHARED = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}

SCRATCH = 2 << 10  # bytes of it that a kernel needs, at most, beside rows that it keeps


def most_shared(kernels: Kernels) -> int:
    """Bytes of shared memory that a block may have on this device."""
    return _shared(kernels.engine.capability)


@cache
def _shared(capability: int) -> int:
    return SHARED[max((known for known in SHARED if known <= capability), default=min(SHARED))]


def blocks(count: int, each: int = 1) -> tuple[int]:
    """A grid for `count` elements, `each` of them to a thread at a time; empty for none."""
    return (min(-(-count // (each * POINTWISE[0])), MOST_BLOCKS),)


def row_blocks(rows: int) -> tuple[int]:
    """A grid for one warp a row."""
    return (-(-rows // 4),)


def parts(rows: int, across: int) -> int:
    """Into how many parts of rows a sum down the columns of `across` blocks is cut: enough to fill a GPU, none of a few rows."""
    return max(1, min(-(-rows // 64), 1024 // max(1, across)))
