"""Instructions of a pipeline, and plans made of them: data alone, no arrays and no transport.

A model is cut in parts, runs of units, numbered from its input. A stage is a rank of the pipeline: it holds one part, or
several (its chunks). Instructions name parts; `place` alone says on which stage a part lies.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple


class Forward(NamedTuple):
    """Part `part` takes micro-batch `micro` forward, and keeps what its backward halves need."""

    part: int
    micro: int


class BackwardInput(NamedTuple):
    """The gradient of the part's input; it leaves at the end of this half."""

    part: int
    micro: int


class BackwardWeight(NamedTuple):
    """The gradients of the part's weights, after the input half; then the micro-batch holds nothing here any more."""

    part: int
    micro: int


class Backward(NamedTuple):
    """Both halves in one; the gradient of the input leaves at the end of the whole."""

    part: int
    micro: int


What = Literal["activation", "gradient"]
ACTIVATION: What = "activation"
GRADIENT: What = "gradient"


class Send(NamedTuple):
    """Begin to send what the last instruction made to stage `peer`, for part `part` there. No stage waits for a send."""

    what: What
    part: int
    micro: int
    peer: int


class Receive(NamedTuple):
    """Begin to receive what part `part` here will need from stage `peer`; the instruction that needs it waits for it."""

    what: What
    part: int
    micro: int
    peer: int


class Complete(NamedTuple):
    """Wait until what was sent to stage `peer` has arrived there; only where that is known, or at the end of a step."""

    what: What
    part: int
    micro: int
    peer: int


class Handoff(NamedTuple):
    """Give what the last instruction made to part `part` of the same stage."""

    what: What
    part: int
    micro: int


Compute = Forward | BackwardInput | BackwardWeight | Backward
Instruction = Compute | Send | Receive | Complete | Handoff
Message = tuple[What, int, int]
"""What travels, for which part, of which micro-batch: the first three fields of an instruction that moves it."""

Program = tuple[tuple[Instruction, ...], ...]
"""What every stage does, messages included."""


class Plan(NamedTuple):
    """What every stage computes, in order.

    place  the stage of each part
    lists  the instructions of each stage
    """

    place: tuple[int, ...]
    lists: tuple[tuple[Compute, ...], ...]

    @property
    def micro_batches(self) -> int:
        return 1 + max((i.micro for mine in self.lists for i in mine), default=-1)


def needed(instruction: Instruction, parts: int) -> Message | None:
    """The message without which an instruction cannot begin; None for the ends of the model, and for weight halves."""
    match instruction:
        case Forward(part, micro) if part > 0:
            return "activation", part, micro
        case BackwardInput(part, micro) | Backward(part, micro) if part < parts - 1:
            return "gradient", part, micro
    return None


def made(instruction: Instruction, parts: int) -> Message | None:
    """The message that an instruction leaves for another part."""
    match instruction:
        case Forward(part, micro) if part < parts - 1:
            return "activation", part + 1, micro
        case BackwardInput(part, micro) | Backward(part, micro) if part > 0:
            return "gradient", part - 1, micro
    return None


def fused_at_the_input(plan: Plan) -> Plan:
    """The plan with both halves in one where one follows the other in part 0: nobody waits for the gradient of its input.

    So less is held, and the schedule of a single stage is one forward and one backward after the other.
    """
    return plan._replace(lists=tuple(tuple(_fused(mine)) for mine in plan.lists))


def _fused(mine: Sequence[Compute]) -> Iterator[Compute]:
    is_done = False
    for instruction, following in zip(mine, [*mine[1:], None], strict=True):
        match instruction, following:
            case BackwardInput(0, micro), BackwardWeight(0, other) if micro == other:
                yield Backward(0, micro)
                is_done = True
            case _ if not is_done:
                yield instruction
            case _:
                is_done = False


def forward_alone(place: Sequence[int]) -> Plan:
    """What every stage computes to ask the model: one micro-batch's forwards alone."""
    return Plan(
        tuple(place),
        tuple(
            tuple(Forward(part, 0) for part, home in enumerate(place) if home == stage)
            for stage in range(1 + max(place))
        ),
    )


def with_messages(plan: Plan, ahead: int = 1) -> Program:
    """The plan with a Send or Handoff after each instruction that makes something, and a Receive before what needs it.

    A stage completes a send where it is about to wait for what its peer makes later than it uses that message; what is left,
    at the end. To wait for an old send before a new one begins can deadlock.
    ahead  how many instructions a receive begins before the one that needs it, so that the message travels meanwhile
    """
    parts = len(plan.place)
    made_at = {made(i, parts): index for mine in plan.lists for index, i in enumerate(mine)}
    used_at = {needed(i, parts): index for mine in plan.lists for index, i in enumerate(mine)}
    return tuple(
        _with_messages(stage, plan, ahead, made_at, used_at) for stage in range(len(plan.lists))
    )


def _with_messages(
    stage: int,
    plan: Plan,
    ahead: int,
    made_at: Mapping[Message | None, int],
    used_at: Mapping[Message | None, int],
) -> tuple[Instruction, ...]:
    """made_at, used_at: the place of the instruction that makes or uses a message in its stage's list."""
    place, mine = plan.place, plan.lists[stage]
    before: list[list[Instruction]] = [[] for _ in mine]
    for index, instruction in enumerate(mine):
        if message := needed(instruction, len(place)):
            peer = place[_source(message)]
            if peer != stage:
                before[max(0, index - ahead)].append(Receive(*message, peer))
    program: list[Instruction] = []
    sent: list[Send] = []
    for instruction, receives in zip(mine, before, strict=True):
        program += receives
        if (message := needed(instruction, len(place))) and (
            peer := place[_source(message)]
        ) != stage:
            arrived = [
                i
                for i in sent
                if i.peer == peer and used_at.get(i[:3], len(mine)) <= made_at.get(message, -1)
            ]
            program += [Complete(*i) for i in arrived]
            sent = [i for i in sent if i not in arrived]
        program.append(instruction)
        if message := made(instruction, len(place)):
            peer = place[message[1]]
            program.append(Handoff(*message) if peer == stage else Send(*message, peer))
            sent += [i for i in program[-1:] if isinstance(i, Send)]
    program += [Complete(*i) for i in sent]
    return tuple(program)


def _source(message: Message) -> int:
    """The part that a message comes from."""
    what, part, _ = message
    return part - 1 if what == "activation" else part + 1
