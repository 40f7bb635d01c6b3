import numpy as np

EXERCISE = "column"


def row_then_column(rank, ranks, x, a, b):
    hidden = yield "all-reduce", x @ a
    mine = np.maximum(hidden, 0) @ b
    every = yield "all-gather", mine
    return np.concatenate(every, 1)
