"""How many blocks a launch gets."""

POINTWISE = (256,)    # threads a block of the kernels that go element by element
ROWS = (128,)         # of those with one warp a row: four rows a block
MOST_BLOCKS = 2048    # of kernels that go round until nothing is left: enough to fill any GPU


def blocks(count: int, each: int = 1) -> tuple[int]:
    """A grid for `count` elements, `each` of them to a thread at a time; empty for none."""
    return (min(-(-count // (each * POINTWISE[0])), MOST_BLOCKS),)


def row_blocks(rows: int) -> tuple[int]:
    """A grid for one warp a row."""
    return (-(-rows // 4),)


def parts(rows: int, columns: int) -> int:
    """Into how many parts of rows a sum down the columns is cut: enough to fill a GPU, none of only a few rows."""
    return max(1, min(-(-rows // 64), 1024 // max(1, -(-columns // 32))))
