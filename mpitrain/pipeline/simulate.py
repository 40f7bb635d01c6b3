"""Costs of pipeline programs: the simulated time of all stages; memory and weight versions of a stage.

`simulate` runs all stages against each other, and so finds deadlocks. Memory and weight versions
follow from the order of one stage's instructions; their durations have no influence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mpitrain.errors import Sentence
from mpitrain.pipeline.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Complete,
    Compute,
    Forward,
    Handoff,
    Instruction,
    Message,
    Program,
    Receive,
    Send,
    Skip,
    needed,
)


class Cost(NamedTuple):
    """Cost of one chunk for one micro-batch: times in any unit, memory in bytes.

    saved    bytes that the forward saves for the input half
    pending  bytes that the input half saves for the weight half
    forward_bytes, input_bytes, weight_bytes  peak bytes during the forward and each half, with
                                              saved inputs and results; 0: no more than these
    """

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    saved: float = 0
    pending: float = 0
    forward_bytes: float = 0
    input_bytes: float = 0
    weight_bytes: float = 0

    def of(self, instruction: Compute) -> float:
        match instruction:
            case Forward():
                return self.forward
            case BackwardInput():
                return self.backward_input
            case BackwardWeight():
                return self.backward_weight
            case Backward():
                return self.backward_input + self.backward_weight


class Event(NamedTuple):
    """Execution of one instruction on a stage, from `start` to `end`."""

    start: float
    end: float
    instruction: Compute


class Simulation(NamedTuple):
    """Result of a simulation.

    timeline  the events of each stage, in order
    waits     after a deadlock a sentence per stage: its pending message, or that it has finished;
              else empty
    """

    timeline: tuple[tuple[Event, ...], ...]
    waits: tuple[Sentence, ...]

    @property
    def makespan(self) -> float:
        events = [event for of_stage in self.timeline for event in of_stage]
        return max((event.end for event in events), default=0) - min(
            (event.start for event in events), default=0
        )

    @property
    def busy(self) -> float:
        return sum(event.end - event.start for of_stage in self.timeline for event in of_stage)

    @property
    def bubble(self) -> float:
        """Return the fraction of idle time: 1 - busy / (stages x makespan)."""
        return 1 - self.busy / (len(self.timeline) * self.makespan) if self.makespan else 0.0


def simulate(
    program: Program,
    costs: Sequence[Cost],
    transfer: float = 0,
    receive: float = 0,
    is_eager: bool = False,
    overhead: float = 0,
) -> Simulation:
    """Simulate a program, with rendezvous messages unless `is_eager`.

    A rendezvous message starts to travel when its send and its receive have both begun. An eager
    message starts when its send has begun, and its sender does not wait. MPI sends messages up to a
    few KiB eagerly. Only a simulation with rendezvous messages proves that a program cannot
    deadlock.

    costs     of each chunk
    transfer  time that a message travels; it overlaps with compute on both stages
    receive   time that the receiver spends on a message, once it waits for the message
    overhead  host time before each compute instruction
    """
    running = _Running(program, costs, transfer, receive, is_eager, overhead)
    waking = {*range(len(program))}
    while waking:
        waking |= running.advance(waking.pop())
    return Simulation(tuple(map(tuple, running.timeline)), running.waits())


@dataclass
class _Running:
    """State of a simulation: progress and clock of each stage, and start times of messages."""

    program: Program
    costs: Sequence[Cost]
    transfer: float
    receive: float
    is_eager: bool
    overhead: float

    def __post_init__(self) -> None:
        self.timeline: list[list[Event]] = [[] for _ in self.program]
        self._next = [0] * len(self.program)
        self._clocks: list[float] = [0] * len(self.program)
        self._sent: dict[Message, float] = {}
        self._posted: dict[Message, float] = {}
        self._handed: set[Message] = set()

    def advance(self, stage: int) -> set[int]:
        """Run a stage until it has to wait; return the stages that may wait for its messages."""
        instructions, start = self.program[stage], self._next[stage]
        stop = start
        while stop < len(instructions) and self._run(stage, instructions[stop]):
            stop += 1
        self._next[stage] = stop
        return {i.peer for i in instructions[start:stop] if isinstance(i, Send | Receive)}

    def _run(self, stage: int, instruction: Instruction) -> bool:
        clock = self._clocks[stage]
        match instruction:
            case Forward() | BackwardInput() | BackwardWeight() | Backward():
                start = self._start(clock, instruction)
                if start is None:
                    return False
                self._clocks[stage] = end = start + self.costs[instruction.chunk].of(instruction)
                self.timeline[stage].append(Event(start, end, instruction))
            case Send(what, chunk, micro):
                self._sent[what, chunk, micro] = clock
            case Receive(what, chunk, micro):
                self._posted[what, chunk, micro] = clock
            case Handoff():
                self._handed.add(instruction)
            case Skip():
                pass
            case Complete(what, chunk, micro):
                freed = (
                    self._sent.get((what, chunk, micro))
                    if self.is_eager
                    else self._arrival((what, chunk, micro))
                )
                if freed is None:
                    return False
                self._clocks[stage] = max(clock, freed)
        return True

    def _start(self, clock: float, instruction: Compute) -> float | None:
        """Return the start time of an instruction; None until its message is on the way."""
        message = needed(instruction, len(self.costs))
        if message is None or message in self._handed:
            return clock + self.overhead
        arrival = self._arrival(message)
        return None if arrival is None else max(clock, arrival) + self.receive + self.overhead

    def _arrival(self, message: Message) -> float | None:
        """Return the arrival time of a message; None until its send and receive have begun."""
        sent, posted = self._sent.get(message), self._posted.get(message)
        if sent is None or posted is None:
            return None
        return (
            max(sent + self.transfer, posted)
            if self.is_eager
            else max(sent, posted) + self.transfer
        )

    def waits(self) -> tuple[Sentence, ...]:
        """Return a sentence per stage about its pending message; empty if all have finished."""
        standing = [
            instructions[at] if at < len(instructions) else None
            for at, instructions in zip(self._next, self.program, strict=True)
        ]
        return tuple(map(self._wait, range(len(standing)), standing)) if any(standing) else ()

    def _wait(self, stage: int, instruction: Instruction | None) -> Sentence:
        match instruction:
            case None:
                return Sentence("stage {stage} has finished", stage=stage)
            case Complete(what, chunk, micro, peer):
                return Sentence(
                    "stage {stage} waits until stage {peer} receives the {what} of micro-batch {micro} for chunk {chunk}",
                    stage=stage,
                    peer=peer,
                    what=Sentence(what),
                    micro=micro,
                    chunk=chunk,
                )
        message = needed(instruction, len(self.costs))
        assert message is not None  # No other instruction waits.
        what, chunk, micro = message
        source = next(
            (i.peer for i in self.program[stage] if isinstance(i, Receive) and i[:3] == message),
            stage,
        )
        return Sentence(
            "stage {stage} waits for the {what} of micro-batch {micro} for chunk {chunk}, from stage {source}",
            stage=stage,
            what=Sentence(what),
            micro=micro,
            chunk=chunk,
            source=source,
        )


class Peak(NamedTuple):
    """Peaks of one stage's activation memory; each field is a maximum of its own.

    live     micro-batches between the forward and the end of the weight half, counted in each chunk
    whole    of `live`, micro-batches before the end of the input half, which save all activations
    pending  of `live`, micro-batches between the two halves
    nbytes   saved bytes of both kinds, plus the working memory of the current instruction
    """

    live: int
    whole: int
    pending: int
    nbytes: float


def peak(instructions: Sequence[Compute], costs: Sequence[Cost]) -> Peak:
    """Return the peaks of one stage's activation memory.

    instructions  of one stage, in order
    costs         of each chunk of the model
    """
    whole = pending = 0
    nbytes = 0.0
    most = Peak(0, 0, 0, 0)
    for instruction in instructions:
        cost, during = costs[instruction.chunk], nbytes
        match instruction:
            case Forward():
                during += cost.forward_bytes
                whole, nbytes = whole + 1, nbytes + cost.saved
            case BackwardInput():
                during += cost.input_bytes - cost.saved
                whole, pending, nbytes = whole - 1, pending + 1, nbytes - cost.saved + cost.pending
            case BackwardWeight():
                during += cost.weight_bytes - cost.pending
                pending, nbytes = pending - 1, nbytes - cost.pending
            case Backward():
                during += cost.input_bytes - cost.saved
                whole, nbytes = whole - 1, nbytes - cost.saved
        most = Peak(
            max(most.live, whole + pending),
            max(most.whole, whole),
            max(most.pending, pending),
            max(most.nbytes, nbytes, during),
        )
    return most


HELD = ("saved", "output", "input", "gradient", "sent", "pending")
"""Arrays of a chunk that a stage has in memory, for each micro-batch.

saved     what the forward keeps for the backward
output    of the forward, until the next chunk has taken it or its send is complete
input     received from another stage, or a receive that is posted
gradient  of the output, received from another stage, or a receive that is posted
sent      the gradient of the input, until the chunk before has taken it or its send is complete
pending   what the input half of a backward keeps for its weight half
"""
RUNNING = (Forward, Backward, BackwardInput, BackwardWeight)


def held(
    program: Sequence[Instruction], own: Sequence[int], chunks: int, sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return everything that a stage has in memory together, in the course of its program.

    program  of the stage, with messages
    own      the chunks of the stage, of so many in all
    sizes    number of the size of each micro-batch, from 0
    returns  cases, of own chunks x different sizes x (HELD + RUNNING): how many of each, and which instruction
             runs. An array is released when its instruction begins, or when its send is complete.
    """
    wide, different = len(HELD) + len(RUNNING), 1 + max(sizes)
    place = {chunk: row * different * wide for row, chunk in enumerate(own)}
    now, cases, arrived = (
        [0] * (len(own) * different * wide),
        set[tuple[int, ...]](),
        set[Message](),
    )
    saved, output, given, gradient, sent, pending = range(len(HELD))

    def add(what: int, chunk: int, micro: int, number: int) -> None:
        now[place[chunk] + sizes[micro] * wide + what] += number

    def release(what: str, chunk: int, micro: int) -> None:
        """Release the array that the neighbouring chunk made for this one."""
        is_input = what == "activation"
        add(output if is_input else sent, chunk - 1 if is_input else chunk + 1, micro, -1)

    def take(what: str, chunk: int, micro: int, is_end: bool) -> None:
        """Take the input of a chunk, or the gradient of its output; an end of the model has none."""
        if (what, chunk, micro) in arrived:
            add(given if what == "activation" else gradient, chunk, micro, -1)
        elif not is_end:
            release(what, chunk, micro)

    for each in program:
        match each:
            case Receive(what, chunk, micro):
                arrived.add((what, chunk, micro))
                add(given if what == "activation" else gradient, chunk, micro, 1)
            case Complete(what, chunk, micro):
                release(what, chunk, micro)
            case Forward(chunk, micro):
                take("activation", chunk, micro, chunk == 0)
            case Backward(chunk, micro) | BackwardInput(chunk, micro):
                take("gradient", chunk, micro, chunk == chunks - 1)
                add(saved, chunk, micro, -1)
            case BackwardWeight(chunk, micro):
                add(pending, chunk, micro, -1)
            case _:
                continue
        if isinstance(each, RUNNING):
            chunk, micro = each
            running = len(HELD) + RUNNING.index(type(each))
            add(running, chunk, micro, 1)
            cases.add(tuple(now))
            add(running, chunk, micro, -1)
            if isinstance(each, Forward):
                add(saved, chunk, micro, 1)
                add(output, chunk, micro, chunk < chunks - 1)
            elif not isinstance(each, BackwardWeight):
                add(sent, chunk, micro, chunk > 0)
                add(pending, chunk, micro, isinstance(each, BackwardInput))
        cases.add(tuple(now))
    return sorted(cases)


class Weights(NamedTuple):
    """Weight versions of an asynchronous stage during one instruction.

    used        the version that the instruction computes with
    newest      the version that the stage made last
    held        number of versions in memory after the instruction, the newest included
    is_updated  whether an update follows, which makes version newest + 1
    """

    used: int
    newest: int
    held: int
    is_updated: bool


def weights(instructions: Sequence[Compute], every: int = 0) -> list[Weights]:
    """Return the weight versions of an asynchronous stage with one chunk, for each instruction.

    every   micro-batches per update, which all use the newest version but one (PipeDream-2BW);
            0: an update per micro-batch, which uses the newest version at its forward (PipeDream)
    """
    used: dict[int, int] = {}
    newest, by_instruction = 0, []
    for instruction in instructions:
        micro, is_last = instruction.micro, isinstance(instruction, BackwardWeight | Backward)
        if isinstance(instruction, Forward):
            used[micro] = max(0, micro // every - 1) if every else newest
        version = used.pop(micro) if is_last else used[micro]
        is_updated = is_last and (micro + 1) % max(1, every) == 0
        held = len({newest + is_updated, *used.values()})
        by_instruction.append(Weights(version, newest, held, is_updated))
        newest += is_updated
    return by_instruction


def versions(instructions: Sequence[Compute], every: int = 0) -> int:
    """Return the peak number of weight versions on a stage of one chunk.

    every   as in `weights`
    """
    return max((entry.held for entry in weights(instructions, every)), default=0)


def staleness(instructions: Sequence[Compute], every: int = 0) -> int:
    """Return the largest staleness of a gradient on a stage of one chunk, in updates.

    The staleness is the number of updates between a gradient's own version and the version it
    updates.

    every   as in `weights`
    """
    lasts = (
        entry
        for entry, instruction in zip(weights(instructions, every), instructions, strict=True)
        if isinstance(instruction, BackwardWeight | Backward)
    )
    return max((entry.newest - entry.used for entry in lasts), default=0)


def goes_in_passes(instructions: Sequence[Compute]) -> bool:
    """Return whether each chunk runs all its forwards, and all its backwards, in a row.

    ZeRO then gathers a chunk once per pass, and reduces its gradients once.
    """
    passes = [key for key, _ in groupby((i.chunk, isinstance(i, Forward)) for i in instructions)]
    return len(passes) == len(set(passes))
