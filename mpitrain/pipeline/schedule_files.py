"""Schedules in JSON files: reading, writing, and validation before a run.

`place` is the stage of each chunk; `stages` lists the instructions of each stage, in order:

    {"place": [0, 1],
     "stages": ["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1",
                "F1.0 BW1.0 F1.1 BW1.1"]}

F1.0 is the forward of chunk 1 for micro-batch 0. B1.0 is the input half of its backward, W1.0 the
weight half, BW1.0 both halves. The file lists no messages: they follow from the order.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.files import reading_of, text_of, write_whole
from mpitrain.pipeline.schedules import (
    KINDS,
    NAMED,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Plan,
    plan_of,
    table_of,
    with_messages,
)
from mpitrain.pipeline.simulate import Cost, simulate

LETTERS = {kind: letters for letters, kind in KINDS.items()}
EXAMPLE = '{"place": [0, 1], "stages": ["F0.0 BW0.0", "F1.0 BW1.0"]}'
STAGES, MICRO_BATCHES = 4, 8
FIRST = 4
"""Number of faults that an error message lists."""


def word(instruction: Compute) -> str:
    """Return an instruction as a file writes it, such as F1.0."""
    return f"{LETTERS[type(instruction)]}{instruction.chunk}.{instruction.micro}"


def write_plan(path: Path, plan: Plan) -> None:
    lists = ",\n".join(f'  "{" ".join(map(word, instructions))}"' for instructions in plan.by_stage)
    write_whole(path, f'{{"place": {json.dumps(plan.stage_of)},\n "stages": [\n{lists}\n]}}\n')


def read_plan(path: Path) -> Plan:
    """Read a plan from a schedule file.

    raises   ConfigError, before any stage runs, if the plan is incomplete or could deadlock
    """
    with reading_of(f"The schedule {path}", "Name a file."):
        data = text_of(path)
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"The schedule {path} is no JSON: {error}.", f"Write it like {EXAMPLE}."
        ) from None
    is_table = (
        isinstance(table, dict)
        and set(table) == {"place", "stages"}
        and all(
            isinstance(table[name], list) and all(type(entry) is kind for entry in table[name])
            for name, kind in (("place", int), ("stages", str))
        )
    )
    if not is_table:
        raise ConfigError(
            f"The schedule {path} must hold a list of stages, `place`, and a list of strings, `stages`, alone.",
            f"Write it like {EXAMPLE}.",
        )
    plan = Plan(
        tuple(table["place"]),
        tuple(
            tuple(_instruction(text, f"{path}, stage {stage}") for text in words.split())
            for stage, words in enumerate(table["stages"])
        ),
    )
    check(plan, str(path))
    return plan


def find_plan(
    name: str,
    stages: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
) -> Plan:
    """Return the plan of a named schedule, or of a file.

    stages, micro_batches  None: 4 and 8 for a named schedule; the file's own numbers for a file
    raises                 ConfigError if there is no such schedule or file, if the numbers of a
                           file differ from these, or if a plan of a file or a plugin is incomplete
                           or could deadlock
    """
    # An unknown name goes to plan_of as well, which raises the error.
    if name in NAMED or not os.path.exists(name):
        count = MICRO_BATCHES if micro_batches is None else micro_batches
        plan = plan_of(name, STAGES if stages is None else stages, count, chunks)
        if table_of(name).is_added(name):
            check(plan, f"{name}{table_of(name).of_plugin(name)}", count)
        return plan
    plan = read_plan(Path(name))
    theirs = len(plan.by_stage), plan.micro_batches
    if (
        stages not in (None, theirs[0])
        or micro_batches not in (None, theirs[1])
        or chunks is not None
    ):
        asked = ((stages, "stages"), (micro_batches, "micro-batches"), (chunks, "chunks"))
        raise ConfigError(
            f"The schedule {name} is for {theirs[0]} stages and {theirs[1]} micro-batches, and has its own chunks; "
            f"asked for were {', '.join(f'{number} {what}' for number, what in asked if number is not None)}.",
            f"Ask for {theirs[0]} stages, leave the numbers of micro-batches and chunks out, or name another "
            "file.",
        )
    return plan


def _instruction(text: str, where: str) -> Compute:
    """Parse one instruction such as F1.0; `where` names its file and stage in errors."""
    parsed = re.fullmatch(r"(F|B|W|BW)(\d{1,4})\.(\d{1,4})", text)
    if not parsed:
        raise ConfigError(
            f"{where}: {text!r} is no instruction.",
            "F0.3 is the forward of chunk 0 for micro-batch 3; B is the input half, W the weight half, BW both.",
        )
    return KINDS[parsed[1]](int(parsed[2]), int(parsed[3]))


def check(plan: Plan, name: str, micro_batches: int | None = None) -> None:
    """Raise ConfigError with the first faults, unless a plan is complete and cannot deadlock.

    name           of the schedule, for the error
    micro_batches  that it must have; None: any number
    """
    faults = (
        _misplaced(plan)
        or [f"it has {plan.micro_batches} micro-batches, not {micro_batches}"]
        * (micro_batches not in (None, plan.micro_batches))
        or _incomplete(plan)
        or simulate(with_messages(plan), [Cost()] * len(plan.stage_of)).waits
    )
    if faults:
        more = f"\n... and {len(faults) - FIRST} more" if len(faults) > FIRST else ""
        raise ConfigError(
            f"The schedule {name} cannot be run:\n" + "\n".join(faults[:FIRST]) + more,
            "`mpitrain plan schedule --json FILE` writes one that can.",
        )


def _misplaced(plan: Plan) -> Sequence[str]:
    stages = len(plan.by_stage)
    faults = [
        f"chunk {chunk} is on stage {stage}, but there are stages 0 to {stages - 1}"
        for chunk, stage in enumerate(plan.stage_of)
        if not 0 <= stage < stages
    ]
    faults += [
        f"stage {stage} has no chunk" for stage in range(stages) if stage not in plan.stage_of
    ]
    for stage, instructions in enumerate(plan.by_stage):
        faults += [
            f"{word(i)} is on stage {stage}, but its chunk is on {_home(plan, i.chunk)}"
            for i in instructions
            if i.chunk >= len(plan.stage_of) or plan.stage_of[i.chunk] != stage
        ]
    return (
        faults
        or [
            f"there are no {what}"
            for what, number in (("stages", stages), ("micro-batches", plan.micro_batches))
            if not number
        ][:1]
    )


def _home(plan: Plan, chunk: int) -> str:
    return f"stage {plan.stage_of[chunk]}" if chunk < len(plan.stage_of) else "none"


def _incomplete(plan: Plan) -> Sequence[str]:
    """Return the faults of chunks that do not compute each micro-batch once: forward, then both
    halves of the backward.
    """
    faults = []
    for chunk, stage in enumerate(plan.stage_of):
        of_chunk = [i for i in plan.by_stage[stage] if i.chunk == chunk]
        for which, kinds in (
            ("forward", Forward),
            ("input half", BackwardInput | Backward),
            ("weight half", BackwardWeight | Backward),
        ):
            micros = [i.micro for i in of_chunk if isinstance(i, kinds)]
            counts = Counter(micros)
            faults += [
                f"chunk {chunk} has the {which} of micro-batch {k} {counts[k]} times, not once"
                for k in range(plan.micro_batches)
                if counts[k] != 1
            ]
            # A message's tag is the same for all micro-batches, so their order must not change.
            if which != "weight half":
                faults += [
                    f"chunk {chunk} has the {which} of micro-batch {after} after that of {before}, but messages keep order"
                    for before, after in pairwise(micros)
                    if before > after
                ]
        if not faults:
            faults += _early(chunk, of_chunk)
    return faults


def _early(chunk: int, instructions: Sequence[Compute]) -> list[str]:
    """Return the faults of halves that precede the instructions they depend on.

    instructions  of one chunk, each exactly once
    """
    at = {
        (kind, i.micro): index
        for index, i in enumerate(instructions)
        for kind in (Forward, BackwardInput, BackwardWeight)
        if isinstance(i, kind) or (isinstance(i, Backward) and kind is not Forward)
    }
    return [
        f"chunk {chunk} computes {word(instructions[at[after, i.micro]])} before {word(instructions[at[before, i.micro]])}"
        for i in instructions
        if isinstance(i, Forward)
        for before, after in ((Forward, BackwardInput), (BackwardInput, BackwardWeight))
        if at[before, i.micro] > at[after, i.micro]
    ]
