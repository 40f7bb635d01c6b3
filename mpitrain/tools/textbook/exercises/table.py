"""EXERCISES: of each the statement, the function to complete, cases from small to large, and the laws.

An answer is either data (the messages of a ring that goes backwards, or of unequal parameter
servers; the order of computations on each of three pipeline stages), or a generator with
collectives: two layers in tensor parallelism, the mean gradient of a batch, a sharded update.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpitrain.collectives.plans.checked import Step, Transfer, Wrong, simulate, steps_of
from mpitrain.errors import Sentence
from mpitrain.pipeline.schedules import Backward, Compute, Forward, Plan, with_messages
from mpitrain.pipeline.simulate import Cost, peak
from mpitrain.pipeline.simulate import simulate as simulate_pipeline
from mpitrain.tables import Table

Case = tuple[int, ...]
"""Sizes of one question, as ranks and elements."""


class AnswerCost(NamedTuple):
    """What a correct answer costs, and the least possible cost by a formula."""

    counted: float
    formula: float


class Exercise(NamedTuple):
    """A row of the table of exercises.

    function    name of the function that the student's file defines
    sizes       names of the numbers of a case
    arguments   parameters of the function, as they are written in the student's file
    statement   lines of the task
    example     calls on two ranks, and their results
    cases       the questions, the smallest first
    calls       (case) -> arguments of each call of the function
    way         name of the function in `answers.py` that makes the calls in the child
    judge       (case, answer of the child) -> cost; Wrong if the answer breaks a law
    cost        what the cost means
    formula     formula of the least cost, in words
    """

    function: str
    sizes: tuple[str, ...]
    arguments: str
    statement: str
    example: str
    cases: tuple[Case, ...]
    calls: Callable[[Case], list[list[Any]]]
    way: str
    judge: Callable[[Case, Any], AnswerCost]
    cost: str
    formula: str


def check_cost(cost: AnswerCost, name: str) -> AnswerCost:
    if not cost.counted <= cost.formula + 1e-9:
        raise Wrong(
            "the cost ({name}) must be at most {formula:g}, but is {counted:g}",
            name=Sentence(name),
            formula=cost.formula,
            counted=cost.counted,
        )
    return cost


MOST_STEPS = 100

RING_STATEMENT = """An all-reduce on a ring that turns the other way.

Each rank sends only to rank - 1 and receives only from rank + 1, modulo ranks.
The chunks are unequal: of count elements, each of the ranks' chunks has count // ranks,
and each of the first count % ranks chunks has one more.
A message is one whole chunk. Afterwards every rank has the sum of all ranks' arrays.

Return the list of steps of this rank. A step is (sends, receives, adds): two lists of
(peer, start, stop), and whether received elements are added (True) or replace (False)."""

RING_EXAMPLE = """backward_ring(0, 2, 3) -> [([(1, 2, 3)], [(1, 0, 2)], True), ([(1, 0, 2)], [(1, 2, 3)], False)]
backward_ring(1, 2, 3) -> [([(0, 0, 2)], [(0, 2, 3)], True), ([(0, 2, 3)], [(0, 0, 2)], False)]"""

SERVER_STATEMENT = """Parameter servers of unequal size, as messages.

Ranks 0 to servers - 1 are servers, the next `workers` ranks are workers.
Server k stores the elements from cut(k) to cut(k + 1) of count elements, where
cut(k) = count * k * (k + 1) // (servers * (servers + 1)): server k has a share of k + 1.
Each worker sends every server its share of the gradient. A server adds the gradients
and sends each worker the sum. Servers have no gradient; workers send nothing to workers.
Afterwards every worker has the sum of all workers' arrays.

Return the list of steps of this rank. A step is (sends, receives, adds): two lists of
(peer, start, stop), and whether received elements are added (True) or replace (False)."""

SERVER_EXAMPLE = """parameter_server(0, 1, 1, 3) -> [([], [(1, 0, 3)], True), ([(1, 0, 3)], [], False)]
parameter_server(1, 1, 1, 3) -> [([(0, 0, 3)], [], False), ([], [(0, 0, 3)], False)]"""


TO_ANOTHER = "rank {rank} sends to rank {other}, and must do so with rank {peer} alone"
FROM_ANOTHER = "rank {rank} receives from rank {other}, and must do so with rank {peer} alone"


def chunks(ranks: int, count: int) -> list[tuple[int, int]]:
    size, longer = divmod(count, ranks)
    starts = [c * size + min(c, longer) for c in range(ranks + 1)]
    return [*pairwise(starts)]


def sent(steps: Sequence[Step]) -> int:
    return sum(stop - start for sends, _, _ in steps for _, start, stop in sends)


def calls(case: Case) -> list[list[Any]]:
    *before, _ = case
    return [[rank, *case] for rank in range(sum(before))]


def judge_ring(case: Case, answer: Any) -> AnswerCost:
    ranks, count = case
    steps = [
        steps_of(result, rank, ranks, count, f"backward_ring({rank}, {ranks}, {count})", MOST_STEPS)
        for rank, result in enumerate(answer["results"])
    ]
    bounds = chunks(ranks, count)
    for rank, steps_of_rank in enumerate(steps):
        for sends, receives, _ in steps_of_rank:
            _check_peers(sends, rank, (rank - 1) % ranks, TO_ANOTHER)
            _check_peers(receives, rank, (rank + 1) % ranks, FROM_ANOTHER)
            for _, start, stop in (*sends, *receives):
                if (start, stop) not in bounds:
                    raise Wrong(
                        "a message of rank {rank} has elements {start} to {stop}, which are no chunk",
                        rank=rank,
                        start=start,
                        stop=stop,
                    )
    simulate(steps, count)
    sizes = [stop - start for start, stop in bounds]
    # A rank never sends the chunk that it sums last, nor the chunk that its receiver sums last.
    most = 2 * count - min(sizes[rank] + sizes[rank - 1] for rank in range(ranks))
    return check_cost(AnswerCost(max(map(sent, steps)), most), "elements sent by the busiest rank")


def _check_peers(transfers: Sequence[Transfer], rank: int, peer: int, law: str) -> None:
    """Raise Wrong if a transfer of `rank` is with another rank than `peer`.

    law  text of the error
    """
    for other, _, _ in transfers:
        if other != peer:
            raise Wrong(law, rank=rank, other=other, peer=peer)


def judge_server(case: Case, answer: Any) -> AnswerCost:
    workers, servers, count = case
    ranks = workers + servers
    steps = [
        steps_of(
            result,
            rank,
            ranks,
            count,
            f"parameter_server({rank}, {workers}, {servers}, {count})",
            MOST_STEPS,
        )
        for rank, result in enumerate(answer["results"])
    ]
    cuts = [count * k * (k + 1) // (servers * (servers + 1)) for k in range(servers + 1)]
    for rank, steps_of_rank in enumerate(steps):
        for peer, start, stop in (
            transfer for step in steps_of_rank for transfers in step[:2] for transfer in transfers
        ):
            if (rank < servers) == (peer < servers):
                raise Wrong(
                    "rank {rank} exchanges with rank {peer}, but only a worker and a server may",
                    rank=rank,
                    peer=peer,
                )
            server = min(rank, peer)
            if not cuts[server] <= start <= stop <= cuts[server + 1]:
                raise Wrong(
                    "elements {start} to {stop} go through server {server}, which stores {first} "
                    "to {last}",
                    start=start,
                    stop=stop,
                    server=server,
                    first=cuts[server],
                    last=cuts[server + 1],
                )
    simulate(steps, count, range(servers, ranks))
    share = max(stop - start for start, stop in pairwise(cuts))
    return check_cost(
        AnswerCost(max(map(sent, steps)), max(count, workers * share)),
        "elements sent by the busiest rank",
    )


STAGES = 3

SCHEDULE_STATEMENT = """1F1B on a pipeline of three stages, with whole backwards.

Stage 0 has the first layers, stage 2 the last ones and the loss. A backward is one
instruction: it is not cut in an input half and a weight half.
Stage s saves the activations of at most 3 - s micro-batches at the same time, from their
forward to the end of their backward. No stage is idle longer than necessary.

Return the order of this stage's computations, as a list of texts: "F0" is the forward of
micro-batch 0, "B0" its backward. Messages need no instructions."""

SCHEDULE_EXAMPLE = """two_stages(0, 3) -> ["F0", "F1", "B0", "F2", "B1", "B2"]
two_stages(1, 3) -> ["F0", "B0", "F1", "B1", "F2", "B2"]"""


def judge_schedule(case: Case, answer: Any) -> AnswerCost:
    (micro_batches,) = case
    lists = tuple(
        _instructions(stage, words, micro_batches) for stage, words in enumerate(answer["results"])
    )
    plan = Plan(tuple(range(STAGES)), lists)
    # A backward takes as long as two forwards.
    costs = [Cost(1, 1, 1)] * STAGES
    simulation = simulate_pipeline(with_messages(plan), costs)
    if simulation.waits:
        raise Wrong("the stages wait forever: {waits}", waits=simulation.waits)
    for stage, instructions in enumerate(lists):
        live = peak(instructions, costs).live
        if live > STAGES - stage:
            raise Wrong(
                "stage {stage} may save {most} micro-batches at a time, but saves {live}",
                stage=stage,
                most=STAGES - stage,
                live=live,
            )
    return check_cost(
        AnswerCost(simulation.makespan, 3 * (micro_batches + STAGES - 1)),
        "time of a step in forwards",
    )


def _instructions(stage: int, words: Any, micro_batches: int) -> tuple[Compute, ...]:
    """Return a stage's instructions.

    raises  Wrong unless each forward and backward of the stage is there exactly once
    """
    instructions: list[Compute] = []
    for word in words:
        match = re.fullmatch(r"([FB])([0-9]{1,6})", word) if isinstance(word, str) else None
        if not match or int(match[2]) >= micro_batches:
            raise Wrong(
                "stage {stage} has no computation {one} with {micro_batches} micro-batches",
                stage=stage,
                one=repr(word)[:40],
                micro_batches=micro_batches,
            )
        kind = Forward if match[1] == "F" else Backward
        instructions.append(kind(stage, int(match[2])))
    for micro in range(micro_batches):
        # Instructions are tuples: a forward equals the backward of the same micro-batch.
        at = {
            letter: [
                n
                for n, instruction in enumerate(instructions)
                if isinstance(instruction, kind) and instruction.micro == micro
            ]
            for letter, kind in (("F", Forward), ("B", Backward))
        }
        for letter, positions in at.items():
            if len(positions) != 1:
                raise Wrong(
                    "stage {stage} must compute {one} once, but does so {times} times",
                    stage=stage,
                    one=f"{letter}{micro}",
                    times=len(positions),
                )
        if at["B"] < at["F"]:
            raise Wrong(
                "stage {stage} has {one} before the forward of the same micro-batch",
                stage=stage,
                one=f"B{micro}",
            )
    return tuple(instructions)


LAYERS_STATEMENT = """Two linear layers with ReLU between, divided over ranks: rows first, then columns.

y = relu(x a) b, with x of shape (B, I), a (I, H) and b (H, O).
This rank has some columns of x, the same rows of a, and some columns of b; the ranks'
shares may differ in size. Every rank returns the whole y, of shape (B, O).

The function is a generator. These two lines are collectives, which all ranks must reach:
    total = yield "all-reduce", array     # the sum of all ranks' arrays
    arrays = yield "all-gather", array    # the list of all ranks' arrays
Use as few elements as possible. Return y with `return`."""

LAYERS_EXAMPLE = """row_then_column(0, 2, [[1]], [[1, 0]], [[1], [0]]) -> [[3, 6]]
row_then_column(1, 2, [[2]], [[1, -1]], [[2], [1]]) -> [[3, 6]]"""

Matrix = np.ndarray


def tensors(case: Case) -> tuple[Matrix, Matrix, Matrix]:
    """Return x (rows, inputs), a (inputs, hidden), b (hidden, outputs) of whole numbers from -8 to
    8.
    """
    _, rows, inputs, hidden, outputs = case

    def filled(height: int, width: int, step: int) -> Matrix:
        return (step * np.arange(height * width) % 17 - 8.0).reshape(height, width)

    return filled(rows, inputs, 5), filled(inputs, hidden, 7), filled(hidden, outputs, 3)


def layer_calls(case: Case) -> list[list[Any]]:
    ranks = case[0]
    x, a, b = tensors(case)
    shares = zip(
        np.array_split(x, ranks, 1),
        np.array_split(a, ranks, 0),
        np.array_split(b, ranks, 1),
        strict=True,
    )
    return [
        [rank, ranks, *(tensor.tolist() for tensor in share)] for rank, share in enumerate(shares)
    ]


def judge_layers(case: Case, answer: Any) -> AnswerCost:
    _, rows, _, hidden, outputs = case
    x, a, b = tensors(case)
    y = np.maximum(x @ a, 0) @ b
    return judge_programs(case[0], answer, y, 2 * rows * hidden + rows * outputs)


def judge_programs(ranks: int, answer: Any, expected: Matrix, elements: float) -> AnswerCost:
    """Judge results that must be the same on all ranks.

    elements  least number of elements in the collectives; those of an all-reduce count twice
    """
    for rank, result in enumerate(answer["results"]):
        values = np.array(result, float)
        if values.shape != expected.shape:
            raise Wrong(
                "rank {rank} must return the shape {expected}, but returns {found}",
                rank=rank,
                expected=expected.shape,
                found=values.shape,
            )
        values, wanted = np.atleast_2d(values), np.atleast_2d(expected)
        wrong = np.argwhere(~(np.abs(values - wanted) <= 1e-9))  # NaN is wrong, too.
        if len(wrong):
            row, column = map(int, wrong[0])
            raise Wrong(
                "rank {rank} must have {expected:g} in row {row}, column {column}, but has {found:g}",
                rank=rank,
                expected=wanted[row, column],
                row=row,
                column=column,
                found=values[row, column],
            )
    # A ring's all-reduce moves 2 (n - 1) / n of an array through each rank, an all-gather half.
    share = (ranks - 1) / ranks
    counted = sum(
        share * (2 * total / ranks if name == "all-reduce" else total)
        for name, total in answer["collectives"]
    )
    formula = share * elements
    if counted < formula - 1e-9:
        # All ranks run in one process, so a global name would be memory that they share.
        raise Wrong(
            "the collectives move {counted:g} elements, but a result needs {formula:g}: "
            "ranks share no memory",
            counted=counted,
            formula=formula,
        )
    return check_cost(AnswerCost(counted, formula), "elements that a rank sends by rings")


MEAN_STATEMENT = """The mean gradient of a batch whose rows are divided unequally.

This rank has `rows` rows of the batch, and `gradient`, the mean of their gradients.
The other ranks have other numbers of rows, which this rank does not know.
Every rank returns the mean gradient of all rows, of the shape of `gradient`.

The function is a generator. This line is a collective, which all ranks must reach:
    total = yield "all-reduce", array     # the sum of all ranks' arrays
Use as few elements as possible. Return the mean with `return`."""

MEAN_EXAMPLE = """mean_of_the_batch(0, 2, 1, [4, 0]) -> [7, 3]
mean_of_the_batch(1, 2, 3, [8, 4]) -> [7, 3]"""


def gradients(case: Case) -> tuple[Sequence[int], Matrix]:
    """Return the number of rows of each rank, and the mean gradient of each (ranks, count)."""
    ranks, count = case
    filled = (5 * np.arange(ranks * count) % 17 - 8.0).reshape(ranks, count)
    return [1 + rank % 3 for rank in range(ranks)], filled


def mean_calls(case: Case) -> list[list[Any]]:
    rows, means = gradients(case)
    pairs = zip(rows, means.tolist(), strict=True)
    return [[rank, case[0], own, mean] for rank, (own, mean) in enumerate(pairs)]


def judge_mean(case: Case, answer: Any) -> AnswerCost:
    rows, means = gradients(case)
    return judge_programs(case[0], answer, np.average(means, 0, rows), 2 * (case[1] + 1))


ZERO_STATEMENT = """A step of ZeRO stage 1: each rank updates only its shard.

Every rank has all parameters w, and a gradient of its own. The shard of rank r is part r of
np.array_split(w, ranks); `momentum` is the state of this shard alone. The update is
    momentum = momentum / 2 + sum of all ranks' gradients
    w = w - momentum
Every rank returns all updated parameters.

The function is a generator. These two lines are collectives, which all ranks must reach:
    total = yield "all-reduce", array     # the sum of all ranks' arrays
    arrays = yield "all-gather", array    # the list of all ranks' arrays
Use as few elements as possible. Return w with `return`."""

ZERO_EXAMPLE = """sharded_update(0, 2, [1, 2, 3], [1, 0, 2], [4, 2]) -> [-2, 0, -3]
sharded_update(1, 2, [1, 2, 3], [0, 1, 1], [6]) -> [-2, 0, -3]"""


def zero_calls(case: Case) -> list[list[Any]]:
    ranks, count = case
    w, (_, means) = np.arange(count) - 2.0, gradients(case)
    momenta = np.array_split(2 * np.arange(count) % 7, ranks)
    return [
        [rank, ranks, w.tolist(), means[rank].tolist(), momenta[rank].tolist()]
        for rank in range(ranks)
    ]


def judge_zero(case: Case, answer: Any) -> AnswerCost:
    asked = zero_calls(case)
    momentum = np.concatenate([call[4] for call in asked]) / 2 + sum(
        np.array(call[3]) for call in asked
    )
    return judge_programs(case[0], answer, np.array(asked[0][2]) - momentum, 3 * case[1])


def cases(words: str) -> tuple[Case, ...]:
    """Return the cases that a text has: 1,0 1,3 are two cases of two sizes."""
    return tuple(tuple(map(int, word.split(","))) for word in words.split())


EXERCISES: Table[str, Exercise] = Table(
    {
        "ring": Exercise(
            "backward_ring",
            ("ranks", "count"),
            "rank, ranks, count",
            RING_STATEMENT,
            RING_EXAMPLE,
            cases("1,0 1,3 2,1 2,2 2,3 3,1 3,3 3,5 4,7 5,23 7,24"),
            calls=lambda case: [[rank, *case] for rank in range(case[0])],
            way="values",
            judge=judge_ring,
            cost="elements sent by the busiest rank",
            formula="2 count - the two smallest neighbouring chunks",
        ),
        "server": Exercise(
            "parameter_server",
            ("workers", "servers", "count"),
            "rank, workers, servers, count",
            SERVER_STATEMENT,
            SERVER_EXAMPLE,
            cases("1,1,0 1,1,1 2,1,1 1,2,3 2,2,3 3,2,7 2,3,12 4,3,25"),
            calls=calls,
            way="values",
            judge=judge_server,
            cost="elements sent by the busiest rank",
            formula="max(count, workers x largest share)",
        ),
        "1f1b": Exercise(
            "three_stages",
            ("micro_batches",),
            "stage, micro_batches",
            SCHEDULE_STATEMENT,
            SCHEDULE_EXAMPLE,
            tuple((m,) for m in (1, 2, 3, 4, 5, 8)),
            calls=lambda case: [[stage, *case] for stage in range(STAGES)],
            way="values",
            judge=judge_schedule,
            cost="time of a step in forwards",
            formula="3 (micro_batches + 2)",
        ),
        "column": Exercise(
            "row_then_column",
            ("ranks", "B", "I", "H", "O"),
            "rank, ranks, x, a, b",
            LAYERS_STATEMENT,
            LAYERS_EXAMPLE,
            cases("1,1,1,1,1 1,2,3,4,2 2,1,2,1,2 2,2,3,4,3 3,2,4,3,5 4,3,7,5,9"),
            calls=layer_calls,
            way="programs",
            judge=judge_layers,
            cost="elements that a rank sends by rings",
            formula="(n - 1) / n (2 B H + B O)",
        ),
        "mean": Exercise(
            "mean_of_the_batch",
            ("ranks", "count"),
            "rank, ranks, rows, gradient",
            MEAN_STATEMENT,
            MEAN_EXAMPLE,
            cases("1,1 2,1 2,3 3,2 5,4"),
            calls=mean_calls,
            way="programs",
            judge=judge_mean,
            cost="elements that a rank sends by rings",
            formula="2 (n - 1) / n (count + 1)",
        ),
        "zero": Exercise(
            "sharded_update",
            ("ranks", "count"),
            "rank, ranks, w, gradient, momentum",
            ZERO_STATEMENT,
            ZERO_EXAMPLE,
            cases("1,1 1,3 2,2 2,3 3,7 4,10"),
            calls=zero_calls,
            way="programs",
            judge=judge_zero,
            cost="elements that a rank sends by rings",
            formula="3 (n - 1) / n count",
        ),
    }
)
"""Exercises by name. A new one needs a row here, and the Korean of its texts."""
