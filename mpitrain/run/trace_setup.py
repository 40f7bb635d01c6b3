"""What a run notes in the traces of its ranks beside what they do: who they are, and what the clocks of their hosts differ by."""

import os
import sys
import time
from pathlib import Path

from mpitrain.run.build import Job
from mpitrain.run.run_dir import trace_file
from mpitrain.transport.base import Transport
from mpitrain.transport.clocks import Clocks


class Traced:
    """The trace of this rank, if the run keeps one."""

    def __init__(self, transport: Transport, job: Job, folder: Path):
        """Give the recorder its file in the run directory; collective. A disk that has no room for it does not end a run."""
        self._recorder, self._peak = transport.recorder, -1
        recorder = self._recorder
        if not recorder.is_on:
            return
        rank, grid = transport.rank, job.trainer.grid
        self._clocks = Clocks(transport, recorder.clock)
        recorder.facts(
            run=job.done.run,
            rank=rank,
            ranks=transport.size,
            host=transport.hosts[rank],
            process=os.getpid(),
            time=time.time(),
            device=job.trainer.backend.kind,
            place=None if grid.is_server else grid.place._asdict(),
        )
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
        """Measure the clocks again: between two measurements a clock is taken to drift evenly. Collective."""
        if self._recorder.is_on:
            self._recorder.facts(clock=self._clocks.measure())

    def peak(self, nbytes: int) -> None:
        """Note how much the activations of this rank have taken at most."""
        if self._recorder.is_on and nbytes != self._peak:
            self._peak = nbytes
            self._recorder.facts(peak_activation_bytes=nbytes)
