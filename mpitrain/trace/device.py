"""Spans of device compute, recorded after they finish, so that the host never waits."""

from collections.abc import Callable
from typing import Any, NamedTuple

from mpitrain.machine.backend import Mark

MOST = 512
"""Largest number of spans that are recorded together."""


class DeviceSpan(NamedTuple):
    """Device work between two marks (CUDA events).

    step    number of the optimizer step
    fields  of its record, after the times
    began   seconds of the host's clock at the launch
    """

    step: int
    fields: tuple[int, ...]
    began: float
    first: Mark
    last: Mark


class DeviceSpans:
    """Device work between pairs of marks, as spans on the host's clock.

    The device passes a mark when the host makes it, or later. So each mark is a lower bound for the
    offset from device time to host time. At least once a step the host reads a result. At its next
    mark the device is idle, and the bound is exact. So the largest bound of a step is its offset.
    """

    def __init__(
        self, mark: Callable[[], Any], clock: Callable[[], float], write: Callable[..., int]
    ):
        """Connect the device to a trace.

        mark   () -> a mark in the device's work
        clock  () -> seconds of the host's clock
        write  (start, end, *fields) -> the number of the written record
        """
        self._mark, self._clock, self._write = mark, clock, write
        # Maps the number of the host's own record to (step, fields, began, first mark).
        self._open: dict[int, tuple[int, tuple[int, ...], float, Mark]] = {}
        self._launched: list[DeviceSpan] = []

    def begin(self, number: int, step: int, fields: tuple[int, ...]) -> None:
        """Begin a span: the host starts to launch work.

        number  of the host's own record
        fields  of the device's record, after the times
        """
        if self._launched and (step != self._launched[0].step or len(self._launched) >= MOST):
            self.note()
        self._open[number] = step, fields, self._clock(), self._mark()

    def end(self, number: int) -> None:
        """End a span: the host has launched all of its work."""
        if number in self._open:
            self._launched.append(DeviceSpan(*self._open.pop(number), self._mark()))

    def interrupt(self) -> None:
        """End all open spans until `resume`: the host waits, so the device may run idle."""
        for opened in self._open.values():
            self._launched.append(DeviceSpan(*opened, self._mark()))

    def resume(self) -> None:
        """Reopen the spans that `interrupt` ended."""
        for number, (step, fields, _, _) in self._open.items():
            self._open[number] = step, fields, self._clock(), self._mark()

    def note(self) -> None:
        """Write the finished spans; a later call writes the spans that are still running."""
        while self._launched:
            step, count = self._launched[0].step, 0
            while count < min(MOST, len(self._launched)) and self._launched[count].step == step:
                count += 1
            if not self._launched[count - 1].last.test():
                return
            zero = self._launched[0].first
            ahead = max(span.began - span.first.since(zero) for span in self._launched[:count])
            for span in self._launched[:count]:
                self._write(
                    ahead + span.first.since(zero), ahead + span.last.since(zero), *span.fields
                )
            del self._launched[:count]
