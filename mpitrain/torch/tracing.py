"""The trace of a PyTorch program, which `mpitrain report` reads as that of a run.

A step lasts from one `step` of an optimizer to the next. Python's waits for collectives are its waits;
DistributedDataParallel waits in C++, so its waits for gradients count as computation.
"""

import os
import time
from contextlib import ExitStack
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from mpitrain.errors import ConfigError
from mpitrain.machine.process import own_id
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.timeline import trace_file
from mpitrain.transport.agreement import from_all_ranks
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks


def traced(transport: Transport, folder: Path) -> Transport:
    """Return the transport, with a recorder that writes to FOLDER/trace; collective.

    raises  ConfigError on every rank if a trace cannot be written
    """
    recorder, rank = Recorder(), transport.rank
    trace = trace_file(folder, rank)
    run = transport.gather_text(int(time.time()))[0]
    recorder.facts(
        run=str(run),
        rank=rank,
        ranks=transport.size,
        host=transport.hosts[rank],
        process=os.getpid(),
        process_id=own_id(),
        time=time.time(),
        clock_then=recorder.clock(),
        device="cpu",
        place=None,
        clock=Clocks(transport, recorder.clock).measure(),
    )
    from_all_ranks(transport, lambda: _keep(recorder, trace))
    _Steps(recorder)
    transport.record(recorder)
    return transport


def _keep(recorder: Recorder, trace: Path) -> None:
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorder.keep(trace)
    except OSError as error:
        raise ConfigError(f"No trace can be written to {trace}: {error.strerror}.") from None


class _Steps:
    """Ends a step of the trace, and begins the next, whenever an optimizer has made one."""

    def __init__(self, recorder: Recorder):
        self._recorder, self._step, self._open = recorder, -1, ExitStack()
        self._next()
        register_optimizer_step_post_hook(lambda *of: self._next())

    def _next(self) -> None:
        self._open.close()
        self._step += 1
        self._open.enter_context(self._recorder.stepping(self._step))
        span = self._recorder.compute(self._recorder.name("forward, backward and update"))
        self._open.callback(self._recorder.end, span)
