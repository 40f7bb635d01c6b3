EXERCISE = "ring"


def backward_ring(rank, ranks, count):
    size, longer = divmod(count, ranks)
    starts = [c * size + min(c, longer) for c in range(ranks + 1)]
    chunk = [(starts[c], starts[c + 1]) for c in range(ranks)]
    to, source = (rank - 1) % ranks, (rank + 1) % ranks
    steps = []
    for first, adds in ((rank + 1, True), (rank, False)):
        for step in range(ranks - 1):
            out, into = chunk[(first + step) % ranks], chunk[(first + step + 1) % ranks]
            steps.append(([(to, *out)], [(source, *into)], adds))
    return steps
