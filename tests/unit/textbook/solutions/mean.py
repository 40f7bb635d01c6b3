import numpy as np

EXERCISE = "mean"


def mean_of_the_batch(rank, ranks, rows, gradient):
    total = yield "all-reduce", np.append(rows * gradient, rows)
    return total[:-1] / total[-1]
