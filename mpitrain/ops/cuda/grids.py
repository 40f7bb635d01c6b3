"""Launch geometry: blocks of a launch, threads of a block, and limits of its shared memory."""

from functools import cache

from mpitrain.kernels.loader import Kernels

POINTWISE = (256,)  # threads per block of element-wise kernels
ROWS = (128,)  # threads per block of kernels with one warp per row: four rows a block
# Threads per block of kernels with one block per row, for long rows. They have enough loads in
# flight for the full memory bandwidth.
WIDE_ROWS = (1024,)
MOST_BLOCKS = 2048  # blocks of a kernel that loops over its data: enough to fill any GPU

# Bytes of shared memory per block, by compute capability.
# A device uses the largest entry that is not above its own capability.
SHARED = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    87: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}

# shared memory, in bytes, that a kernel may need in addition to the rows it stores there
SCRATCH = 2 << 10


def most_shared(kernels: Kernels) -> int:
    """Return the bytes of shared memory that a block may have on this device."""
    return shared_of(kernels.engine.capability)


@cache
def shared_of(capability: int) -> int:
    """Return the bytes of shared memory that a block may have at a compute capability."""
    return SHARED[max((known for known in SHARED if known <= capability), default=min(SHARED))]


def blocks(count: int, each: int = 1) -> tuple[int]:
    """Return a grid for `count` elements, `each` elements per thread at a time; (0,) for none."""
    return (min(-(-count // (each * POINTWISE[0])), MOST_BLOCKS),)


def row_blocks(rows: int) -> tuple[int]:
    """Return a grid with one warp per row."""
    return (-(-rows // 4),)


def parts(rows: int, across: int) -> int:
    """Return the number of parts of rows in a sum down columns: enough to fill a GPU.

    There are at most rows / 64 parts, rounded up.
    across  blocks across the columns
    """
    return max(1, min(-(-rows // 64), 1024 // max(1, across)))
