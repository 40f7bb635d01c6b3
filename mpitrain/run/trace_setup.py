"""Headers of the traces of a run: the identity of each rank and the clock offset of its host."""

import os
import sys
import time
from pathlib import Path

from mpitrain.machine import process
from mpitrain.machine.process import own_id
from mpitrain.run.build import Job
from mpitrain.trace.timeline import trace_file
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks

STEPS = 3
"""Steps after which the process has touched all of its memory."""


class Traced:
    """The trace of this rank; without run.trace its methods do nothing."""

    def __init__(self, transport: Transport, job: Job, folder: Path):
        """Open the trace file in the run directory, and write its header; collective.

        If the file cannot be written, the rank prints a warning, and the run continues.
        """
        self._recorder, self._peak, self._grown = transport.recorder, -1, Growth()
        self._released = 0
        recorder = self._recorder
        if not recorder.is_on:
            return
        rank, grid = transport.rank, job.trainer.grid
        # Gradients and optimizer state are zeros whose pages the first step touches.
        counted, replication = job.trainer.counted.peak, job.trainer.replication
        self._clocks = Clocks(transport, recorder.clock)
        recorder.facts(
            run=job.done.run,
            rank=rank,
            ranks=transport.size,
            host=transport.hosts[rank],
            process=os.getpid(),
            process_id=own_id(),
            time=time.time(),
            clock_then=recorder.clock(),
            device=job.trainer.backend.kind,
            place=None if grid.is_server else grid.coords._asdict(),
        )
        if not job.trainer.counted.problem:
            state = sum(replication.held_by_kind().values()) - replication.store.parameters.nbytes
            recorder.facts(counted_activation_bytes=counted, counted_growth_bytes=counted + state)
        self.align()
        try:
            recorder.keep(trace_file(folder, rank))
        except OSError as error:
            print(
                f"warning: rank {rank} cannot keep a trace in {folder}: {error.strerror}.",
                file=sys.stderr,
                flush=True,
            )

    def align(self) -> None:
        """Measure the clock offsets again; collective.

        Readers of the trace interpolate the drift linearly between two measurements.
        """
        if self._recorder.is_on:
            self._recorder.facts(clock=self._clocks.measure())

    def peak(self, nbytes: int) -> None:
        """Note the peak memory of this rank's activations in bytes, if it has changed."""
        if self._recorder.is_on and nbytes != self._peak:
            self._peak = nbytes
            self._recorder.facts(peak_activation_bytes=nbytes)

    def released(self, nbytes: int) -> None:
        """Note the most activation memory that a release gave back, if it has changed."""
        if self._recorder.is_on and nbytes != self._released:
            self._released = nbytes
            self._recorder.facts(released_bytes=nbytes)

    def stepped(self) -> None:
        """Record by how many bytes the process has grown, at the end of its third step."""
        if self._recorder.is_on and (grown := self._grown.stepped()) is not None:
            self._recorder.facts(grown_bytes=grown)


class Growth:
    """The growth of the process's peak resident memory over its first STEPS steps."""

    def __init__(self) -> None:
        self._steps, self._before = 0, process.peak_memory()

    def stepped(self) -> int | None:
        """Return the growth in bytes at the end of step STEPS, and None at the end of others."""
        self._steps += 1
        return process.peak_memory() - self._before if self._steps == STEPS else None
