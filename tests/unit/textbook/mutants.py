"""Wrong solutions of the exercises: one textual change of a right one each."""

MUTANTS = {
    "ring": [
        ("(rank - 1) % ranks, (rank + 1) % ranks", "(rank + 1) % ranks, (rank - 1) % ranks"),
        ("size + min(c, longer)", "size"),
        ("size + min(c, longer)", "size + max(0, c - ranks + longer)"),
        ("range(ranks - 1)", "range(ranks)"),
        ("range(ranks - 1)", "range(max(0, ranks - 2))"),
        ("(rank, False)", "(rank, True)"),
        ("(rank + 1, True)", "(rank + 1, False)"),
        ("(rank + 1, True)", "(rank, True)"),
        ("(first + step + 1) % ranks]", "(first + step) % ranks]"),
        ("(rank, False)):", "(rank + 1, False)):"),
        (
            "steps.append(([(to, *out)], [(source, *into)], adds))",
            "steps += [([(to, *out)], [], adds), ([], [(source, *into)], adds)]",
        ),
        ("return steps", "return {tuple(map(str, step)) for step in steps}"),
    ],
    "server": [
        ("k * (k + 1) // (servers * (servers + 1))", "k // servers"),
        ("(k + 1) // (servers", "(k - 1) // (servers"),
        ("(mine, [], False)", "(mine, [], True), (mine, [], False)"),
        ("[([], mine, True)", "[([], mine, False)"),
        ("range(servers, servers + workers)", "range(servers + 1, servers + workers)"),
        (
            "return [(every, [], False), ([], every, False)]",
            "return [([], every, False), (every, [], False)]",
        ),
        ("([], every, False)]", "([], every, True)]"),
        ("return [(every, [], False)", "return [(every[:1], [], False)"),
        ("range(servers)]", "range(servers - 1)]"),
    ],
    "1f1b": [
        ("min(2 - stage, micro_batches)", "min(3 - stage, micro_batches)"),
        ("min(2 - stage, micro_batches)", "2 - stage"),
        ("min(2 - stage, micro_batches)", "min(1, micro_batches)"),
        ("min(2 - stage, micro_batches)", "micro_batches"),
        ('        order.append(f"B{k}")', '        order.insert(0, f"B{k}")'),
        ('order.append(f"B{k}")', 'order.append(f"B{micro_batches - 1 - k}")'),
        ("if k + ahead < micro_batches", "if k + ahead < micro_batches - 1"),
        ("return order", "return [one.lower() for one in order]"),
    ],
    "column": [
        ("np.maximum(hidden, 0)", "hidden"),
        ('"all-reduce", x @ a', '"all-reduce", np.maximum(x @ a, 0)'),
        ("np.concatenate(every, 1)", "np.concatenate(every, 0)"),
        ("np.concatenate(every, 1)", "mine"),
        ("np.concatenate(every, 1)", "np.concatenate(every[::-1], 1)"),
        ("    every = yield", "    if rank == 0:\n        return mine\n    every = yield"),
        ('hidden = yield "all-reduce", x @ a', 'hidden = sum((yield "all-gather", x @ a))'),
        ('hidden = yield "all-reduce", x @ a', "hidden = x @ a"),
        ("    hidden = yield", '    yield "all-reduce", x[:0]\n    hidden = yield'),
        (
            '    every = yield "all-gather", mine\n    return np.concatenate(every, 1)',
            '    whole = np.zeros((len(x), 9 * ranks))\n    return (yield "all-reduce", whole)',
        ),
    ],
    "mean": [
        ("rows * gradient, rows", "gradient, 1"),
        ("total[-1]", "ranks"),
        ("return total[:-1] / total[-1]", "return total / total[-1]"),
        ("np.append(rows * gradient, rows)", "np.append(rows * gradient, [rows, 0])"),
    ],
    "zero": [
        ("momentum / 2", "momentum"),
        ("return np.concatenate(shards)", "return shards[rank]"),
        ("[rank] - own", "[rank] + own"),
        ('"all-reduce", gradient', '"all-gather", gradient\n    total = sum(total)'),
        ("np.array_split(total, ranks)[rank]", "np.array_split(gradient, ranks)[rank]"),
    ],
}
"""{exercise: (text, replacement)}."""
