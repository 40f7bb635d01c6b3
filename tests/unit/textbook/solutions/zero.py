import numpy as np

EXERCISE = "zero"


def sharded_update(rank, ranks, w, gradient, momentum):
    total = yield "all-reduce", gradient
    own = momentum / 2 + np.array_split(total, ranks)[rank]
    shards = yield "all-gather", np.array_split(w, ranks)[rank] - own
    return np.concatenate(shards)
