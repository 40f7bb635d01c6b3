"""Instructions of a pipeline schedule, and plans made of them: data only, no arrays, no transport.

A model is cut into chunks: runs of consecutive units, numbered from the model's input. A stage is a
rank of the pipeline. It holds one chunk or several (Megatron's virtual pipeline stages). `chunk` of
an instruction is the number of a chunk. Only `Plan.stage_of` maps chunks to stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple


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
    return plan._replace(
        by_stage=tuple(tuple(_fused(instructions, first)) for instructions in plan.by_stage)
    )


def _fused(instructions: Sequence[Compute], first: int) -> Iterator[Compute]:
    is_done = False
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        match instruction, following:
            case BackwardInput(chunk, micro), BackwardWeight(same, other) if (
                chunk == same == first and micro == other
            ):
                yield Backward(chunk, micro)
                is_done = True
            case _ if not is_done:
                yield instruction
            case _:
                is_done = False


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
