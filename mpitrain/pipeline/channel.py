"""What crosses the boundaries between parts that lie on different stages: an activation or a gradient of a micro-batch."""

from collections.abc import Callable
from typing import Any

from mpitrain.machine.arena import Arena
from mpitrain.pipeline.instructions import ACTIVATION, GRADIENT, Message
from mpitrain.transport.base import Request, Transport


class Channel:
    """The messages of one stage, as its instructions name them.

    One tag for each boundary and direction serves all micro-batches, for each part meets them in ascending order on both sides.
    Both sides know a message's shape beforehand, so that nothing else travels.

    sent  {what: (messages, bytes)} of the step
    """

    def __init__(self, transport: Transport, arena: Arena, dtype: Any):
        """transport: of the stages, by rank; dtype: of all messages."""
        self._transport, self._arena, self._dtype = transport, arena, dtype
        self._recorder = recorder = transport.recorder
        self._names = {
            what: recorder.name(what, transport.members) for what in (ACTIVATION, GRADIENT)
        }
        self._sends: dict[Message, tuple[Request, Any]] = {}
        self._receives: dict[Message, tuple[Request, Any]] = {}

    def begin(self, shape: Callable[[int, int], tuple[int, ...]]) -> None:
        """What follows is one step's. shape: (part, micro-batch) -> of the part's input."""
        self._shape = shape
        self.sent = dict.fromkeys((ACTIVATION, GRADIENT), (0, 0))

    def send(self, message: Message, array: Any, peer: int) -> None:
        """Begin to send an array, which is kept until `complete`; nobody may write into it."""
        what, _, micro = message
        messages, nbytes = self.sent[what]
        self.sent[what] = messages + 1, nbytes + array.nbytes
        self._recorder.about(self._names[what], micro)
        self._sends[message] = self._transport.start_send(array, peer, _tag(message)), array
        self._recorder.about(0, -1)

    def complete(self, message: Message) -> None:
        """Wait until what was sent is there."""
        self._wait(self._sends.pop(message)[0], message)

    def receive(self, message: Message, peer: int) -> None:
        """Begin to receive an array."""
        what, part, micro = message
        array = self._arena.take(self._shape(part + (what == "gradient"), micro), self._dtype)
        self._recorder.about(self._names[what], micro)
        self._receives[message] = self._transport.start_recv(array, peer, _tag(message)), array
        self._recorder.about(0, -1)

    def received(self, message: Message) -> Any:
        """Wait for an array; it is the caller's."""
        request, array = self._receives.pop(message)
        self._wait(request, message)
        return array

    def _wait(self, request: Request, message: Message) -> None:
        what, part, micro = message
        self._transport.traffic.content = f"the {what} of micro-batch {micro} for part {part}"
        request.wait()
        self._transport.traffic.content = ""

    def poll(self) -> None:
        """Move what is under way along; called between layers, for messages move only while somebody calls the transport."""
        for request, _ in (*self._sends.values(), *self._receives.values()):
            request.test()


def _tag(message: Message) -> int:
    what, part, _ = message
    return 2 * part + (what == "gradient")
