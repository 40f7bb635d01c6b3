"""What a device computed, noted when it is known: the rank that started it runs ahead, and waits for nothing on this account."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.machine.events import Mark

MOST = 512
"""Spans that are noted together at most."""


class Launched(NamedTuple):
    """What was started between two marks. fields: of its record behind the times; began: by the host's clock."""

    step: int
    fields: tuple[int, ...]
    began: float
    first: Mark
    last: Mark


class DeviceSpans:
    """Work between pairs of marks, as spans by the host's clock.

    A device comes past a mark when it was made or later, and at least once in a step, of which the host reads the result, it has
    nothing else to do and is there at once. So of all that the marks of a step say of the device's clock against the host's the
    latest is right.
    """

    def __init__(
        self, mark: Callable[[], Any], clock: Callable[[], float], write: Callable[..., int]
    ):
        """mark: in the device's work; write: fields of a record, from its start and end on."""
        self._mark, self._clock, self._write = mark, clock, write
        self._open: dict[
            int, tuple[int, tuple[int, ...], float, Mark]
        ] = {}  # by the number of the host's own record
        self._launched: list[Launched] = []

    def begin(self, number: int, step: int, fields: tuple[int, ...]) -> None:
        """The host starts work."""
        if self._launched and (step != self._launched[0].step or len(self._launched) >= MOST):
            self.note()
        self._open[number] = step, fields, self._clock(), self._mark()

    def end(self, number: int) -> None:
        """The host has started all of it."""
        if number in self._open:
            self._launched.append(Launched(*self._open.pop(number), self._mark()))

    def interrupt(self) -> None:
        """The host waits for messages, and starts no more until `resume`: what is open need not keep the device busy."""
        for opened in self._open.values():
            self._launched.append(Launched(*opened, self._mark()))

    def resume(self) -> None:
        """The host goes on."""
        for number, (step, fields, _, _) in self._open.items():
            self._open[number] = step, fields, self._clock(), self._mark()

    def note(self) -> None:
        """Write what was started and is done; what is not is asked for again."""
        while self._launched:
            step, count = self._launched[0].step, 0
            while count < min(MOST, len(self._launched)) and self._launched[count].step == step:
                count += 1
            if not self._launched[count - 1].last.test():
                return
            zero = self._launched[0].first
            ahead = max(one.began - one.first.since(zero) for one in self._launched[:count])
            for one in self._launched[:count]:
                self._write(
                    ahead + one.first.since(zero), ahead + one.last.since(zero), *one.fields
                )
            del self._launched[:count]
