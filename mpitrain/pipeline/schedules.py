"""Pipeline schedules: the instructions of each stage, in order. Data only: no arrays, no transport.

A model is cut into chunks: runs of consecutive units, numbered from the model's input. A stage is a
rank of the pipeline. It holds one chunk or several (Megatron's virtual pipeline stages). `chunk` of
an instruction is the number of a chunk. Only `Plan.stage_of` maps chunks to stages.

Most schedules give each instruction a key and sort a stage's instructions by key. The key rises
strictly along every dependency. So no number of stages and micro-batches can deadlock. `zb_v` lists
its order directly; the tests simulate it.

Legend: s stage, p stages, m micro-batches, k micro-batch, v chunks per stage, c chunk.

The drawings show time from left to right, as `mpitrain plan schedule` prints it.

    F0   forward of micro-batch 0
    B0   input half of its backward: the gradient of the chunk's input
    W0   weight half of its backward: the gradients of the chunk's weights
    BW0  both halves as one instruction, which takes as long as B and W together
    F0b  the same in a stage's second chunk; a is the first
    ...  idle time: the bubble

A second block of rows continues the first.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

from mpitrain.errors import ConfigError, multiples_near
from mpitrain.tables import Table


class Forward(NamedTuple):
    """Forward of one micro-batch through one chunk; saves the activations for the backward.

    chunk  number of the chunk
    micro  number of the micro-batch in its step
    """

    chunk: int
    micro: int


class BackwardInput(NamedTuple):
    """Input half of a backward (B): the gradient of the chunk's input, sent when this half ends."""

    chunk: int
    micro: int


class BackwardWeight(NamedTuple):
    """Weight half of a backward (W): the gradients of the chunk's weights, after the input half.

    Afterwards the chunk saves nothing of the micro-batch any more.
    """

    chunk: int
    micro: int


class Backward(NamedTuple):
    """Both halves of a backward (BW); the gradient of the input is sent when both are complete."""

    chunk: int
    micro: int


What = Literal["activation", "gradient"]
ACTIVATION: What = "activation"
GRADIENT: What = "gradient"


class Send(NamedTuple):
    """Start of a non-blocking send of the previous instruction's result (MPI_Isend).

    what   "activation" or "gradient"
    chunk  the chunk on stage `peer` that uses the message
    """

    what: What
    chunk: int
    micro: int
    peer: int


class Receive(NamedTuple):
    """Start of a non-blocking receive (MPI_Irecv).

    The instruction that uses the message waits for its arrival.

    chunk  the chunk on this stage that uses the message
    peer   the stage that sends the message
    """

    what: What
    chunk: int
    micro: int
    peer: int


class Complete(NamedTuple):
    """Completion of a send to stage `peer` (MPI_Wait).

    In a program it stands where the peer has certainly received the message, or at the end.
    """

    what: What
    chunk: int
    micro: int
    peer: int


class Skip(NamedTuple):
    """Place of a backward that a frozen chunk does not run; nothing is computed."""

    chunk: int
    micro: int


class Handoff(NamedTuple):
    """Local transfer of the previous instruction's result to chunk `chunk` on the same stage."""

    what: What
    chunk: int
    micro: int


Compute = Forward | BackwardInput | BackwardWeight | Backward
Instruction = Compute | Skip | Send | Receive | Complete | Handoff
Message = tuple[What, int, int]
"""The identity of a message: (kind, receiving chunk, micro-batch).

These are the first three fields of Send, Receive, Complete and Handoff.
"""

Program = tuple[tuple[Instruction, ...], ...]
"""The instructions of every stage in order, messages included."""


class Plan(NamedTuple):
    """Schedule of a pipeline: the compute instructions of every stage, in order.

    stage_of  the stage of each chunk
    by_stage  the instructions of each stage
    """

    stage_of: tuple[int, ...]
    by_stage: tuple[tuple[Compute, ...], ...]

    @property
    def micro_batches(self) -> int:
        return 1 + max(
            (i.micro for instructions in self.by_stage for i in instructions), default=-1
        )


def needed(instruction: Instruction, chunks: int) -> Message | None:
    """Return the message that an instruction waits for.

    None for a forward of the first chunk, a backward of the last chunk, and weight halves.

    chunks  number of chunks in the model
    """
    match instruction:
        case Forward(chunk, micro) if chunk > 0:
            return "activation", chunk, micro
        case BackwardInput(chunk, micro) | Backward(chunk, micro) if chunk < chunks - 1:
            return "gradient", chunk, micro
    return None


def made(instruction: Instruction, chunks: int) -> Message | None:
    """Return the message that an instruction makes for another chunk; None if it makes none."""
    match instruction:
        case Forward(chunk, micro) if chunk < chunks - 1:
            return "activation", chunk + 1, micro
        case BackwardInput(chunk, micro) | Backward(chunk, micro) if chunk > 0:
            return "gradient", chunk - 1, micro
    return None


def fused_at_the_input(plan: Plan, first: int = 0) -> Plan:
    """Merge B and W of chunk `first` into BW where W follows B.

    No stage waits for the gradient of this chunk's input, so the merge delays no other stage. It
    saves memory: on a single stage the schedule becomes one F and one BW per micro-batch.

    first  the first chunk with a backward
    """
    return plan._replace(by_stage=tuple(tuple(_fused(each, first)) for each in plan.by_stage))


def _fused(instructions: Sequence[Compute], first: int) -> list[Compute]:
    fused: list[Compute] = []
    for instruction in instructions:
        match fused[-1:], instruction:
            case [BackwardInput() as before], BackwardWeight(chunk) if (
                chunk == first and before == instruction
            ):
                fused[-1] = Backward(*instruction)
            case _:
                fused.append(instruction)
    return fused


def with_whole_backwards(plan: Plan) -> Plan:
    """Replace each B by BW, and leave out each W: the schedule as textbooks draw it."""
    return plan._replace(
        by_stage=tuple(
            tuple(
                Backward(*i) if isinstance(i, BackwardInput) else i
                for i in instructions
                if not isinstance(i, BackwardWeight)
            )
            for instructions in plan.by_stage
        )
    )


def forward_alone(stage_of: Sequence[int]) -> Plan:
    """Return the plan of an inference: the forwards of one micro-batch through all chunks."""
    return Plan(
        tuple(stage_of),
        tuple(
            tuple(Forward(chunk, 0) for chunk, home in enumerate(stage_of) if home == stage)
            for stage in range(1 + max(stage_of))
        ),
    )


def with_messages(plan: Plan, ahead: int = 1) -> Program:
    """Add messages to a plan: Send or Handoff after each producer, Receive before each consumer.

    Before a stage waits for a message of a peer, it completes those sends to the peer which the
    peer used before it made this message. The other sends complete at the end. A stage that waited
    for an old send before each new one could deadlock.

    ahead  number of instructions between a Receive and its consumer, so that the transfer overlaps
           with computation
    """
    chunks = len(plan.stage_of)
    if chunks == 1:  # No message goes anywhere.
        return plan.by_stage
    numbered = [pair for instructions in plan.by_stage for pair in enumerate(instructions)]
    made_at = {made(i, chunks): index for index, i in numbered}
    used_at = {needed(i, chunks): index for index, i in numbered}
    return tuple(
        _with_messages(stage, plan, ahead, made_at, used_at) for stage in range(len(plan.by_stage))
    )


def _with_messages(
    stage: int,
    plan: Plan,
    ahead: int,
    made_at: Mapping[Message | None, int],
    used_at: Mapping[Message | None, int],
) -> tuple[Instruction, ...]:
    """Return the instructions of one stage with their messages.

    made_at, used_at  {message: index of its producer, or of its consumer, in that one's stage}
    """
    stage_of, instructions = plan.stage_of, plan.by_stage[stage]
    before: list[list[Instruction]] = [[] for _ in instructions]
    for index, instruction in enumerate(instructions):
        if message := needed(instruction, len(stage_of)):
            peer = stage_of[_producing_chunk(message)]
            if peer != stage:
                before[max(0, index - ahead)].append(Receive(*message, peer))
    program: list[Instruction] = []
    sent: list[Send] = []
    for instruction, receives in zip(instructions, before, strict=True):
        program += receives
        if (message := needed(instruction, len(stage_of))) and (
            peer := stage_of[_producing_chunk(message)]
        ) != stage:
            arrived = [
                i
                for i in sent
                if i.peer == peer
                and used_at.get(i[:3], len(instructions)) <= made_at.get(message, -1)
            ]
            program += [Complete(*i) for i in arrived]
            sent = [i for i in sent if i not in arrived]
        program.append(instruction)
        if message := made(instruction, len(stage_of)):
            peer = stage_of[message[1]]
            program.append(Handoff(*message) if peer == stage else Send(*message, peer))
            sent += [i for i in program[-1:] if isinstance(i, Send)]
    program += [Complete(*i) for i in sent]
    return tuple(program)


def training_program(plan: Plan, lowest: int = 0) -> Program:
    """Return the program of a training step: the plan with messages, and with BW in place of B and
    W in the lowest trained chunk.

    lowest  the first chunk with a backward; all chunks before are frozen
    """
    program = with_messages(fused_at_the_input(plan, lowest))
    return without_backward(program, lowest) if lowest else program


def without_backward(program: Program, first: int) -> Program:
    """Remove the backwards of all chunks before `first`, and the gradients sent to these chunks.

    A `Skip` replaces each BW and each input half. Sends of activations complete where they did
    before, since their receiver has used them by then. The result waits for less than the given
    program. So it cannot deadlock if the given program cannot.
    """
    return tuple(tuple(_without_backward(instructions, first)) for instructions in program)


def _without_backward(instructions: Sequence[Instruction], first: int) -> Iterator[Instruction]:
    for instruction in instructions:
        match instruction:
            case BackwardInput(chunk, micro) | Backward(chunk, micro) if chunk < first:
                yield Skip(chunk, micro)
            case BackwardWeight(chunk) if chunk < first:
                pass
            case (
                Send("gradient", chunk)
                | Receive("gradient", chunk)
                | Complete("gradient", chunk)
                | Handoff("gradient", chunk)
            ) if chunk < first:
                pass
            case _:
                yield instruction


def _producing_chunk(message: Message) -> int:
    what, chunk, _ = message
    return chunk - 1 if what == "activation" else chunk + 1


Keyed = tuple[float, Compute]


KINDS: dict[str, Callable[[int, int], Compute]] = {
    "F": Forward,
    "B": BackwardInput,
    "W": BackwardWeight,
    "BW": Backward,
}
"""Instructions by their letters in charts and files.

F forward, B input half of the backward, W weight half, BW both halves.
"""


def by_key(keyed: Iterable[Keyed]) -> list[Compute]:
    return [instruction for _, instruction in sorted(keyed, key=lambda pair: pair[0])]


def naive(s: int, p: int, m: int) -> list[Compute]:
    """Run one micro-batch at a time through all stages and back: the baseline of comparisons.

    No two stages compute at the same time.

        stage 0  F0 ........ BW0-- F1 ........ BW1-- F2 ........ BW2--
        stage 1  .. F0 BW0-- ........ F1 BW1-- ........ F2 BW2-- .....
    """
    return by_key(
        pair
        for k in range(m)
        for pair in ((s + 2 * p * k, Forward(s, k)), (2 * p - 1 - s + 2 * p * k, Backward(s, k)))
    )


def gpipe(s: int, p: int, m: int) -> list[Compute]:
    """Run all forwards, then all backwards. Huang et al. 2019, NeurIPS.

    Every stage saves the activations of m micro-batches.

        stage 0  F0 F1 F2 F3 ................. BW0-- BW1-- BW2-- BW3--
        stage 1  .. F0 F1 F2 F3 ........ BW0-- BW1-- BW2-- BW3-- .....
        stage 2  ..... F0 F1 F2 F3 BW0-- BW1-- BW2-- BW3-- ...........
    """
    return by_key(
        pair
        for k in range(m)
        for pair in ((s + k, Forward(s, k)), (m + 2 * p - 2 - s + k, Backward(s, k)))
    )


def one_f_one_b(s: int, p: int, m: int) -> list[Compute]:
    """Alternate forwards and backwards (1F1B). Narayanan et al. 2019, SOSP.

    Stage s saves the activations of at most p - s micro-batches. The input gradient leaves after B,
    before W computes. This makes the bubble a third smaller, and the message travels during W. A
    training step runs B and W of stage 0 as one BW (`fused_at_the_input`), in the same time.

        stage 0  F0 F1 F2 ..... B0 W0 F3 B1 W1 .. B2 W2 .. B3 W3
        stage 1  .. F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 .. B3 W3 ..
        stage 2  ..... F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 .....
    """
    return by_key(
        pair
        for k in range(m)
        for pair in (
            (s + 2 * k, Forward(s, k)),
            (_backward_key(s, p, k), BackwardInput(s, k)),
            (_backward_key(s, p, k) + 0.5, BackwardWeight(s, k)),
        )
    )


def zero_bubble(s: int, p: int, m: int) -> list[Compute]:
    """Delay the weight halves of 1F1B so that they fill the bubble (ZB-H1). Qi et al. 2024, ICLR.

    Every stage saves the activations of at most p micro-batches.

        stage 0  F0 F1 F2 ..... B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1  .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2  ..... F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return by_key(
        pair
        for k in range(m)
        for pair in (
            (s + 2 * k, Forward(s, k)),
            (_backward_key(s, p, k), BackwardInput(s, k)),
            (2 * p - 1 + s + 2 * k + 0.5, BackwardWeight(s, k)),
        )
    )


def _backward_key(s: int, p: int, k: int) -> int:
    return 2 * p - 1 - s + 2 * k


def interleaved(s: int, p: int, m: int, v: int) -> list[Compute]:
    """Run 1F1B over v chunks per stage (interleaved 1F1B). Narayanan et al. 2021, SC.

    A chunk runs p micro-batches, then the next chunk runs them; m must be a multiple of p.

        stage 0  F0a F1a F0b F1b F2a ... BW0b--- F3a BW1b--- F2b BW0a--- F3b BW1a---
        stage 1  ... F0a F1a F0b BW0b--- F1b BW1b--- F2a BW0a--- F3a BW1a--- F2b BW2b

        stage 0  ... BW2b--- ... BW3b--- BW2a--- BW3a---
        stage 1  --- F3b BW3b--- BW2a--- BW3a--- .......
    """
    keyed: list[Keyed] = []
    for c in range(v):
        for k in range(m):
            group, within = divmod(k, p)
            forward, backward = ((group * v + chunk) * p + within for chunk in (c, v - 1 - c))
            keyed += [
                (2 * (s + forward), Forward(c * p + s, k)),
                (2 * (v * p + p - 1 - s + backward) - 1, Backward(c * p + s, k)),
            ]
    return by_key(keyed)


def breadth_first(s: int, p: int, m: int, v: int) -> list[Compute]:
    """Run all micro-batches through a chunk before the next chunk. Lamy-Poirier 2022.

    ZeRO then gathers a chunk once per pass and reduces its gradients once per step.

        stage 0  F0a F1a F2a F3a F0b F1b F2b F3b ........... BW0b--- BW1b--- BW2b---
        stage 1  ... F0a F1a F2a F3a F0b F1b F2b F3b BW0b--- BW1b--- BW2b--- BW3b---

        stage 0  BW3b--- BW0a--- BW1a--- BW2a--- BW3a---
        stage 1  BW0a--- BW1a--- BW2a--- BW3a--- .......
    """
    n = max(m, p)
    return by_key(
        pair
        for c in range(v)
        for k in range(m)
        for pair in (
            (s + c * n + k, Forward(c * p + s, k)),
            (2 * v * n + p + (p - 1 - s) + (v - 1 - c) * n + k, Backward(c * p + s, k)),
        )
    )


def zb_v(s: int, p: int, m: int) -> list[Compute]:
    """Run two chunks per stage, placed as a V (ZB-V). Qi et al. 2024, NeurIPS.

    It has the least bubble at the memory of 1F1B. The order is a list of words such as F0 and B1: a
    kind of instruction, and the stage's first (0) or second (1) chunk. The k-th use of a word
    computes micro-batch k. Micro-batches from m on are left out.

        stage 0  F0a F1a F2a F3a ... F0b B0b W0b F1b B1b W1b F2b B2b W2b B0a W0a F3b
        stage 1  ... F0a F1a F2a F0b F3a F1b B0b W0b F2b B1b W1b B0a W0a F3b B2b W2b
        stage 2  ....... F0a F0b F1a F1b F2a F2b B0b W0b F3a B0a W0a F3b B1b W1b B1a

        stage 0  B3b W3b B1a W1a ... B2a W2a B3a W3a
        stage 1  B1a W1a B3b W3b B2a ... B3a W2a W3a
        stage 2  W1a B2b W2b B2a B3b B3a W2a W3b W3a
    """
    n = max(m, 2 * p - 1)
    runs = (
        (2 * (p - s) - 1, "F0"),
        (s, "F1 F0"),
        (p - s, "F1 B1 W1"),
        (n - 2 * p + 1 + s, "F0 B0 W0 F1 B1 W1"),
        (p - 1 - s, "B0 W0 F1 B1 W1"),
        (s, "B0 B1"),
        (p - s, "B0 W0"),
        (s, "W1"),
        (s, "W0"),
    )
    chunks = {"0": s, "1": 2 * p - 1 - s}
    counters: dict[str, Iterator[int]] = {}
    instructions: list[Compute] = []
    for times, words in runs:
        for word in words.split() * times:
            micro = next(counters.setdefault(word, count()))
            if micro < m:
                instructions.append(KINDS[word[0]](chunks[word[1]], micro))
    return instructions


def v_half(s: int, p: int, m: int) -> list[Compute]:
    """Run two chunks per stage as a V with about half of 1F1B's memory. Qi et al. 2024, NeurIPS.

    Time is divided into slots of one instruction. Forwards and input halves repeat every six slots,
    and leave two slots free. Each weight half takes the first free slot.

        stage 0  F0a F1a ........... F0b B0b W0b F2a ... F1b B1b W1b B0a W0a F3a F2b
        stage 1  ... F0a ....... F0b F1a ... B0b W0b F1b F2a B0a B1b W0a F2b W1b F3a
        stage 2  ....... F0a F0b ....... F1a F1b B0b W0b B0a W0a F2a F2b B1b W1b B1a

        stage 0  B2b W2b B1a W1a F3b B3b W3b B2a W2a ........... B3a W3a
        stage 1  B1a B2b W1a F3b W2b ... B2a B3b W2a W3b ... B3a W3a ...
        stage 2  W1a F3a F3b B2b W2b B2a W2a ... B3b W3b B3a W3a .......
    """
    down, up, shift = s, 2 * p - 1 - s, 0 if p % 2 else 3
    firsts = (2 * s, 3 * p - 2 - s, 3 * p + shift - 1 + 2 * s, 6 * p + shift - 2 - s)
    keyed: list[Keyed] = []
    for k in range(m):
        forward_down, forward_up, backward_up, backward_down = (first + 6 * k for first in firsts)
        keyed += [
            (forward_down, Forward(down, k)),
            (forward_up, Forward(up, k)),
            (backward_up, BackwardInput(up, k)),
            (backward_down, BackwardInput(down, k)),
        ]
    taken, slot = {first % 6 for first in firsts}, 0
    for key, instruction in sorted(
        (pair for pair in keyed if isinstance(pair[1], BackwardInput)), key=lambda pair: pair[0]
    ):
        slot = next(free for free in count(max(slot, int(key)) + 1) if free % 6 not in taken)
        keyed.append((slot, BackwardWeight(*instruction)))
    return by_key(keyed)


def looped(p: int, v: int) -> tuple[int, ...]:
    """Place the chunks round-robin: stages 0, 1, ..., p - 1, 0, 1, ..., p - 1."""
    return tuple(chunk % p for chunk in range(p * v))


def vee(p: int, v: int) -> tuple[int, ...]:
    """Place the chunks as a V: stages 0, 1, ..., p - 1, p - 1, ..., 1, 0.

    Between the last stage's two chunks no message travels.
    """
    return tuple(min(chunk, 2 * p - 1 - chunk) for chunk in range(2 * p))


class Schedule(NamedTuple):
    """Entry in the table of schedules.

    compute   (stage, stages, micro-batches, chunks per stage) -> the instructions of the stage
    chunks    number of chunks per stage, if the schedule fixes it; None: any number
    stage_of  (stages, chunks per stage) -> the stage of each chunk
    grouped   whether the number of micro-batches must be a multiple of the number of stages
    every     of an asynchronous schedule: (stages) -> the least possible `every` of `weights` in
              simulate.py; None: the schedule is synchronous
    """

    compute: Callable[[int, int, int, int], list[Compute]]
    chunks: int | None = None
    stage_of: Callable[[int, int], tuple[int, ...]] = looped
    grouped: bool = False
    every: Callable[[int], int] | None = None


def of_chunks(
    compute: Callable[[int, int, int], list[Compute]],
    chunks: int,
    stage_of: Callable[[int, int], tuple[int, ...]],
) -> Schedule:
    return Schedule(lambda s, p, m, v: compute(s, p, m), chunks, stage_of)


SCHEDULES: Table[str, Schedule] = Table(
    {
        "naive": of_chunks(naive, 1, looped),
        "gpipe": of_chunks(gpipe, 1, looped),
        "1f1b": of_chunks(one_f_one_b, 1, looped),
        "interleaved": Schedule(interleaved, grouped=True),
        "zero-bubble": of_chunks(zero_bubble, 1, looped),
        "zb-v": of_chunks(zb_v, 2, vee),
        "v-half": of_chunks(v_half, 2, vee),
        "breadth-first": Schedule(breadth_first),
    }
)
"""Synchronous schedules by name.

The command line, `train` and the tests of all schedules read this table. A schedule of the house
also has a row in README.md beside this file, and formulas in tests/unit/pipeline/test_schedules.py.
"""

STREAMS: Table[str, Schedule] = Table(
    {
        "async": SCHEDULES["1f1b"]._replace(every=lambda p: 0),
        "async-2bw": SCHEDULES["1f1b"]._replace(every=lambda p: p),
    }
)
"""Asynchronous schedules by name. `STREAMS` of `parallel/modes.py` has a row for each.

They run 1F1B without a flush between steps: the pipeline does not drain, and each stage updates by
itself. `async_pipeline.py` runs the steps; `parallel/weight_stashing.py` updates.

PipeDream (async) with steps of 4 micro-batches. Below each instruction is its weight version;
* marks an update, which makes the next version. Micro-batches 4 to 7 belong to the next step:

    stage 0  F0 F1 F2 ..... B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 F6 B4 W4 F7 B5 W5
    version  0  0  0        0  0* 1  0  0* 2  0  0* 3  1  1* 4  2  2* 5  3  3*
    stage 1  .. F0 F1 .. B0 W0 F2 B1 W1 F3 B2 W2 F4 B3 W3 F5 B4 W4 F6 B5 W5 F7
    version     0  0     0  0* 1  0  0* 2  1  1* 3  2  2* 4  3  3* 5  4  4* 6
    stage 2  ..... F0 B0 W0 F1 B1 W1 F2 B2 W2 F3 B3 W3 F4 B4 W4 F5 B5 W5 F6 B6
    version        0  0  0* 1  1  1* 2  2  2* 3  3  3* 4  4  4* 5  5  5* 6  6

PipeDream-2BW (async-2bw) has the same order, but updates once a step: * stands at W3, W7, ...
Step t computes with version max(0, t - 1), counted from 0.
"""

SERIAL = "1f1b"
"""The schedule with which a single stage ends each micro-batch before it begins the next."""

NAMED = ChainMap(STREAMS, SCHEDULES)
"""All schedules by name, the synchronous ones first."""


def table_of(name: str) -> Table[str, Schedule]:
    return STREAMS if name in STREAMS else SCHEDULES


def plan_of(name: str, stages: int, micro_batches: int, chunks: int | None = None) -> Plan:
    """Return the plan of a schedule in the table.

    name    a key of NAMED
    chunks  chunks per stage; None: the schedule's own number, or 2 if it allows any
    raises  ConfigError for an unknown name, and for numbers that the schedule does not allow
    """
    if name not in NAMED:
        raise ConfigError(
            f"The schedule must be one of {', '.join(NAMED)}, or a file, but {name!r} is neither."
        )
    schedule = NAMED[name]
    many = chunks if chunks is not None else schedule.chunks or 2
    if min(stages, micro_batches, many) < 1:
        raise ConfigError(
            f"A pipeline has at least 1 stage, 1 micro-batch and 1 chunk a stage, but these are {stages}, "
            f"{micro_batches} and {many}."
        )
    if schedule.chunks not in (None, many):
        others = ", ".join(other for other, line in NAMED.items() if line.chunks in (None, many))
        raise ConfigError(
            f"Schedule {name} has {schedule.chunks} chunk(s) a stage, but {many} were asked for.",
            f"Leave the number of chunks out, or take one of {others}.",
        )
    if schedule.grouped and micro_batches % stages:
        raise ConfigError(
            f"Schedule {name} takes as many micro-batches at a time as there are stages, but {stages} stages do "
            f"not divide {micro_batches} micro-batches.",
            f"Take {multiples_near(micro_batches, stages)} micro-batches, or schedule 1f1b or breadth-first, which "
            "serve any number.",
        )
    make, table = partial(_made, schedule, stages, micro_batches, many), table_of(name)
    lists, stage_of = (
        table.made(
            name,
            "schedule",
            make,
            "lists of instructions, and the stages of chunks",
            lambda made: _are_instructions(made[0]) and _are_numbers(made[1]),
        )
        if table.is_added(name)
        else make()
    )
    return Plan(tuple(stage_of), tuple(map(tuple, lists)))


def _made(
    schedule: Schedule, stages: int, micro_batches: int, chunks: int
) -> tuple[list[list[Compute]], Sequence[int]]:
    """Return the instructions of each stage, and the stage of each chunk."""
    lists = [schedule.compute(stage, stages, micro_batches, chunks) for stage in range(stages)]
    return lists, schedule.stage_of(stages, chunks)


def _are_instructions(lists: list[list[Compute]]) -> bool:
    return all(
        isinstance(instructions, Sequence)
        and all(isinstance(i, Compute) and _are_numbers(i) for i in instructions)
        for instructions in lists
    )


def _are_numbers(numbers: Sequence[int]) -> bool:
    return isinstance(numbers, Sequence) and all(
        type(number) is int and number >= 0 for number in numbers
    )
