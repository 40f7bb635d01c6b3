"""The exercise 1f1b: the order of computations on each of three pipeline stages."""

import re
from typing import Any

from mpitrain.collectives.plans.own_file import Wrong
from mpitrain.pipeline.instructions import Backward, Compute, Forward, Plan, with_messages
from mpitrain.pipeline.simulate import Cost as Times
from mpitrain.pipeline.simulate import peak, simulate
from mpitrain.tools.textbook.exercises.exercise import AnswerCost, Case, Exercise, check_cost

STAGES = 3

STATEMENT = """1F1B on a pipeline of three stages, with whole backwards.

Stage 0 has the first layers, stage 2 the last ones and the loss. A backward is one
instruction: it is not cut in an input half and a weight half.
Stage s saves the activations of at most 3 - s micro-batches at the same time, from their
forward to the end of their backward. No stage is idle longer than necessary.

Return the order of this stage's computations, as a list of texts: "F0" is the forward of
micro-batch 0, "B0" its backward. Messages need no instructions."""

BODY = """    order = []
    # order.append("F0")
    raise NotImplementedError
"""


def judge(case: Case, answer: Any) -> AnswerCost:
    """Check the schedule: every instruction once, no deadlock, live micro-batches, and time."""
    (micro_batches,) = case
    lists = tuple(
        _instructions(stage, words, micro_batches) for stage, words in enumerate(answer["results"])
    )
    plan = Plan(tuple(range(STAGES)), lists)
    # A backward takes as long as two forwards.
    costs = [Times(1, 1, 1)] * STAGES
    simulation = simulate(with_messages(plan), costs)
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
    """Return a stage's instructions; Wrong unless each of its passes is there exactly once."""
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


EXERCISES = {
    "1f1b": Exercise(
        "three_stages",
        ("micro_batches",),
        "stage, micro_batches",
        STATEMENT,
        BODY,
        tuple((m,) for m in (1, 2, 3, 4, 5, 8)),
        calls=lambda case: [[stage, *case] for stage in range(STAGES)],
        way="values",
        judge=judge,
        cost="time of a step in forwards",
        formula="3 (micro_batches + 2)",
    ),
}
