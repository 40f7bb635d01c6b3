"""The MPI session of a command: connects the ranks, and ends them together or aborts the job."""

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.cli.terminal.output import silence
from mpitrain.errors import MpitrainError
from mpitrain.machine import blas_kernels, process

if TYPE_CHECKING:
    # This module must not import NumPy before `mpi_session` has limited the BLAS threads.
    from mpitrain.transport.base import Transport

STALL_SECONDS = 600.0
"""Seconds in which the ranks must connect, unless the configuration sets run.stall_seconds."""
MOST = 10**6
"""Upper limit of options that count something."""
TRAINS = "mpitrain.run.recovery"
"""The module that a spare loads before it waits, as it will need it at once."""
LONGEST = 1e9
"""Longest timeout, in seconds, that a timer of the operating system accepts."""


@contextmanager
def mpi_session(
    allow_alone: bool = False,
    kind: Callable[[], str] = lambda: "cpu",
    patience: Callable[[], float] = lambda: STALL_SECONDS,
    does_trace: Callable[[], bool] = lambda: False,
    grace: Callable[[], float] = lambda: 0.0,
    thread_level: str = "serialized",
    kernels: Callable[[], str | None] = lambda: None,
) -> "Iterator[Transport]":
    """Connect the ranks, yield the transport, and pass a barrier before any rank exits.

    Rank 0 prints an error that all ranks raise, and all exit with its code. Any other exception
    aborts the whole job at once and prints this rank's traceback.

    allow_alone  accept N started processes that each see an MPI world of one rank
    kind         returns the configured device.kind, since a GPU is chosen before MPI starts;
                 its errors are ignored here, because the caller raises them again on all ranks
    patience     returns the seconds in which the ranks must connect; its errors are ignored too
    does_trace   returns whether to record a trace, from before the first message; errors as above
    grace        returns the seconds from the end of the block to the end of this process; 0: no limit
    thread_level of MPI, as for `connect`
    kernels      returns the kernels of OpenBLAS that a resumed run began with, or None
    """
    process.limit_blas_threads()
    blas_kernels.choose(kernels)
    process.yield_crowded_cores()
    seconds = STALL_SECONDS
    recorder = None
    with suppress(MpitrainError, OSError):
        seconds = patience()
        process.choose_gpu(kind())
        if does_trace():
            from mpitrain.trace.startup import begun

            launched = process.launched()
            recorder = begun(launched.rank, launched.size, launched.local_size)
    from mpitrain.trace.recorder import CONNECTING, SILENT
    from mpitrain.transport.agreement import ending_together
    from mpitrain.transport.failures import leave_within
    from mpitrain.transport.mpi import join_world, refuse_strangers

    # mpi4py holds the GIL during MPI_Init, so a watchdog thread in Python could not run.
    # The timer of faulthandler needs no GIL, and exits with code 1.
    faulthandler.dump_traceback_later(min(seconds, LONGEST), exit=True, file=2)
    with (recorder or SILENT).pausing(CONNECTING):
        transport: Transport = join_world(thread_level, partial(import_module, TRAINS))
    if recorder:
        transport.record(recorder)
    faulthandler.cancel_dump_traceback_later()
    _count_local_ranks(transport, kind)
    if transport.joins:  # The GPU of the lost rank is free now.
        place, host = transport.rank, transport.hosts[transport.rank]
        with suppress(MpitrainError, OSError):
            process.choose_gpu(kind(), transport.hosts[:place].count(host))

    def leaving() -> None:
        if seconds := grace():
            leave_within(min(seconds, LONGEST))

    with ending_together(transport, leaving):
        if not allow_alone:
            refuse_strangers()
        yield transport


def _count_local_ranks(transport: "Transport", kind: Callable[[], str]) -> None:
    """Divide the GPUs, cores and terminal of each host among its ranks if the launcher is unknown.

    Such a launcher sets no variable with the local rank, so each rank assumed that it was alone.
    """
    if process.launched().launcher != "none" or transport.size == 1:
        return
    own = transport.hosts[transport.rank]
    with suppress(MpitrainError, OSError):
        process.choose_gpu(kind(), transport.hosts[: transport.rank].count(own))
    process.lower_blas_threads(transport.hosts.count(own))
    if transport.rank > 0:
        silence()


def configured_of(folder: Path, settings: list[str]) -> Callable[[], Any]:
    """Return a function that reads, once, the configuration of a run directory for one rank."""

    @cache
    def configured() -> Any:
        from mpitrain.run.build import configured

        return configured(folder, settings)

    return configured


def leave_usage(show: Callable[[], None], exit_code: int) -> None:
    """Exit as `leave_together` does, for a command line that is wrong before MPI has started."""
    if process.launched().size == 1:
        show()
        sys.exit(exit_code)
    from mpitrain.transport.agreement import leave_together
    from mpitrain.transport.mpi import join_world

    leave_together(join_world(), show, exit_code)
