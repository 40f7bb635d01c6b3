"""The injector: makes the failure of run.inject happen when the run passes its point."""

import sys

from mpitrain.config.faults import KINDS, Injection, injection
from mpitrain.run.injection.failures import FAILURES, partner
from mpitrain.run.injection.lost_message import Losing
from mpitrain.transport.base import Transport
from mpitrain.transport.traced_transport import Recorded


class Injector:
    """The failure of one run on this rank; it happens once.

    The run calls `passes` at each of its points. `transport` is the one that the run must use.
    """

    def __init__(self, text: str, transport: Transport):
        """Parse the text of run.inject, which is not empty."""
        failure = injection(text)
        assert failure
        self.failure, self._losing = failure, None
        self.transport: Transport = transport
        if failure.kind == "lose":
            # The trace shows the send of the message, as if the network had lost it.
            if isinstance(transport, Recorded):
                self._losing = Losing(transport.inner)
                self.transport = transport.over(self._losing)
            else:
                self.transport = self._losing = Losing(transport)
        # An injection that does not fit the ranks is refused after the start.
        fits = failure.rank < transport.size >= KINDS[failure.kind].ranks
        ranks = [failure.rank]
        if failure.kind == "deadlock":
            ranks.append(partner(transport, failure.rank))
        self._is_due = fits and transport.rank in ranks

    def is_due(self, point: str, step: int) -> bool:
        """Return whether the failure happens now; True only once.

        point  a name of `POINTS`
        step   from 1, or 0 at the start
        """
        if not self._is_due or point != self.failure.point or step < self.failure.step:
            return False
        self._is_due = False
        say(self.failure, self.transport.rank, step)
        return True

    def passes(self, point: str, step: int) -> None:
        """Fail if it is time to; arguments as `is_due`."""
        if not self.is_due(point, step):
            return
        if self._losing:
            self._losing.is_armed = True
        else:
            FAILURES[self.failure.kind](self.transport, self.failure.rank)


def say(failure: Injection, rank: int, step: int) -> None:
    """Print the failure that happens now, so that a log shows it as artificial."""
    point = "" if failure.point == "step" else f"{failure.point} of "
    where = f"{point}step {step}" if step else "the start"
    print(f"rank {rank}: run.inject: {failure.kind} at {where}", file=sys.stderr, flush=True)
