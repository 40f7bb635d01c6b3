"""The stop that a batch job asks for before its time limit, on which all ranks of a program agree."""

import signal
from functools import cache

import numpy as np

from mpitrain.collectives.engine.executor import Reduction
from mpitrain.collectives.group import Group
from mpitrain.machine import stop_signals
from mpitrain.transport.mpi import connect


def stop_requested() -> bool:
    """Return whether the program shall save a checkpoint and exit with 85; the same on all ranks.

    A rank is asked by USR1, which the scripts of `mpitrain slurm` pass on before the time limit, or
    by TERM, as of `scancel`. One asked rank is enough.

    Collective over all ranks of the MPI job: each call is a round of small messages, so one for each
    step is enough.
    """
    stop_signals.note(signal.SIGUSR1, signal.SIGTERM)
    asked, any_rank = agreement()
    asked[0] = stop_signals.are_noted()
    any_rank.run()
    return bool(asked[0])


@cache
def agreement() -> tuple[np.ndarray, Reduction]:
    """Return a flag of this rank, and the reduction that raises it where one rank has raised it.

    `replace` drops them: they know the lost rank.
    """
    transport = connect("multiple")  # A process group that is made later has threads that call MPI.
    asked = np.zeros(1, np.int32)
    return asked, Group(transport, "recursive-doubling").bind(asked, "maximum")
