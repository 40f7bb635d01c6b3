"""Going on after the loss of ranks: what a rank keeps of its run, and how the next trainer is filled.

PeerLost in any call of the run
  each rank      forgets the transports and the trainer, and keeps data and state   Recovery.keep
  living ranks   connect                                                            Recovery.go_on
  then the run starts anew in its folder, as a resumed one does, but
  living ranks   copy the state of the highest finished step, if a rank has all
                 of it; else they load the newest checkpoint               Recovery.built
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.config import Config
from mpitrain.data import Source, Unopened
from mpitrain.errors import ConfigError, PeerLost, TrainingError, on_every_rank
from mpitrain.files import opened
from mpitrain.run.build import Job, build
from mpitrain.run.checkpoint.loading import put, taken
from mpitrain.run.checkpoint.manifest import Done, step_of
from mpitrain.run.checkpoint.regions import HeldRegion, described, holdings
from mpitrain.run.hooks import RunState
from mpitrain.run.resolve import Given
from mpitrain.run.run_dir import check_idle
from mpitrain.trace.timeline import TRACE
from mpitrain.transport.base import Transport

LOOK = 0.05
"""Seconds between two looks whether the process of a lost rank has left its lock."""


class Held(NamedTuple):
    """The whole state of a rank after a step.

    arrays   those of `Replication.kept`, in its order, which no message changes
    regions  of tensors in these arrays; their padding depends on the number of ranks
    scalars  as in a `Manifest`
    loss     of the last step; None: it is not known
    """

    arrays: list[Any]
    regions: list[HeldRegion]
    done: Done
    scalars: dict[str, float]
    loss: float | None = None


class Recovery:
    """What one rank keeps of a run with run.on_failure=continue.

    facts   of this start for the metrics; {} before a loss
    """

    def __init__(self, config: Config, transport: Transport):
        """transport: the root; raises ConfigError, on every rank, if the run cannot lose a rank."""
        check(config, transport)
        self._config, self._root, self._folder = config, transport, ""
        self._source: Source | Unopened | None = None
        self._held: Held | None = None
        self._filling: Held | None = None
        self._filler = -1
        self._saved: int | None = None
        self._began, self._timer, self._doing = time.monotonic(), threading.Timer(0, bool), ""
        self.facts: dict[str, Any] = {}

    def built(self, transport: Transport, agreed: Given) -> Job:
        """Build the job of a start, with the state of the living ranks if that is the newest; collective."""
        if not self.facts:
            job = build(transport, agreed)
        else:
            job = self._filled(build(transport, self._chosen(agreed), source=self._source))
        self._hold(job)
        return job

    def _hold(self, job: Job) -> None:
        """Keep a new job's data and state; the state of the job before is given up."""
        self._source, replication = job.source, job.trainer.replication
        settings = job.trainer.config.replication
        if settings.mode == "all-reduce" and not settings.zero and settings.wire == "none":
            job.trainer.sync_parameters()
            kept = replication.kept()
            self._held = Held(
                [buffer.array for buffer in kept],
                holdings(described(job.trainer.storage, kept)),
                job.done,
                replication.step_end.skips.scalars(),
            )

    @contextmanager
    def of_run(self, run: RunState) -> Iterator[None]:
        """Note at a loss after which step the state is that of this rank."""
        self._folder = str(run.folder)
        if self.facts.get("filled_from") == "ranks":
            run.saved_at = self._saved
        run.limit.shorten(time.monotonic() - self._began)
        try:
            yield
        except PeerLost:
            if self._held and run.finished > run.first:
                scalars = run.trainer.replication.step_end.skips.scalars()
                done = run.after(run.finished)
                self._held = self._held._replace(done=done, scalars=scalars, loss=run.loss)
            raise

    def go_on(self, law: str) -> Callable[[], Config]:
        """Connect the living ranks, and return `configured` of their start; collective.

        law     of the error that reported the loss
        raises  TrainingError if all ranks live
        """
        self.over()
        self._timer = threading.Timer(self._config.run.recover_seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        gc.collect()  # Tracebacks may form cycles, which would keep the old trainer.
        before, self._doing = self._root.size, "connecting the living ranks"
        while True:
            try:
                self._root.abandon()
                self._root.survivors()
                # A start that the loss has interrupted may have got further on some ranks.
                known = self._root.gather_text([self._folder, self._source is not None])
                break
            except PeerLost:
                continue
        size = self._root.size
        if size == before:
            raise TrainingError(f"Messages fail although no rank is lost: {law}")
        self.facts = {"lost": before - size}
        folders, are_open = zip(*known, strict=True)
        self._folder = self._folder or next(filter(None, folders), "")
        self._source = self._source if all(are_open) else None
        run = self._config.run.model_copy(update={"inject": ""})
        if self._root.rank == 0:
            print(f"{before - size} of {before} ranks are lost; {size} go on", file=sys.stderr)
        if self._folder:
            run = run.model_copy(update={"out": self._folder})
            if self._root.rank == 0:
                self._doing = f"waiting for the lock of {self._folder}"
                self._free(Path(self._folder))
        self._doing = "building the job of the living ranks"
        return lambda: self._config.model_copy(update={"run": run})

    def _free(self, folder: Path) -> None:
        """Wait until the folder is unlocked, and put the traces of the old ranks aside."""
        while True:
            with suppress(ConfigError):
                check_idle(folder)
                break
            time.sleep(LOOK)
        with suppress(OSError), opened(folder) as run:
            names, number = set(run.names()), 1
            while f"{TRACE}-{number}" in names:
                number += 1
            at = {"src_dir_fd": run.descriptor, "dst_dir_fd": run.descriptor}
            os.rename(TRACE, f"{TRACE}-{number}", **at)

    def _chosen(self, agreed: Given) -> Given:
        """Choose between the ranks and the newest checkpoint; return what `build` needs; collective."""
        held = self._held and self._held._replace(arrays=[], regions=[])
        everyone = [one and Held(*one) for one in self._root.gather_text(held)]
        steps = [Done(*one.done).step if one else -1 for one in everyone]
        self._filler, self._filling = steps.index(max(steps)), None
        saved = agreed.location.saved
        self._saved = step_of(Path(saved).name) if saved else None
        if max(steps) < (self._saved or 0):
            self.facts |= {"filled_from": "checkpoint" if saved else "nothing"}
            return agreed
        self._filling = everyone[self._filler]
        self.facts |= {"filled_from": "ranks", "loss": self._filling.loss}
        return agreed._replace(location=agreed.location._replace(saved=""))

    def _filled(self, job: Job) -> Job:
        """Fill a new job from the rank that `_chosen` has found, if there is one; collective."""
        if not self._filling:
            return job
        trainer = job.trainer
        trainer.sync_parameters()
        kept, backend = trainer.replication.kept(), trainer.backend
        regions = holdings(described(trainer.storage, kept))
        held = self._held if self._filler == self._root.rank else None
        for region, old in zip(regions, held.regions if held else regions, strict=True):
            values = np.empty(region.part.length, region.dtype)
            if held:
                values[:] = taken(held.arrays[old.number], old, backend)
            trainer.grid.world.broadcast(values, self._filler)
            put(kept[region.number].array, region, values, backend)
        trainer.replication.restore(self._filling.scalars)
        return job._replace(done=Done(*self._filling.done))

    def over(self) -> None:
        """End the limit of run.recover_seconds: the next step begins, or the run has failed."""
        self._timer.cancel()

    def _give_up(self) -> None:
        seconds = self._config.run.recover_seconds
        error = TrainingError(
            f"After a loss the run did not go on within run.recover_seconds {seconds:g}: it was {self._doing}.",
            "Start it again with --resume=auto, or raise run.recover_seconds.",
        )
        self._root.abort(str(error))


def check(config: Config, transport: Transport) -> None:
    """Raise ConfigError, on every rank, if a run of these ranks cannot lose one."""
    layout, replication = config.layout, config.replication
    sizes = f"tp x pp x cp is {layout.tp} x {layout.pp} x {layout.cp}"
    why, _, way_out = transport.needs_all.partition("; ")
    is_together = replication.mode in ("all-reduce", "master") or (
        replication.mode == "server" and replication.update == "sync"
    )
    for is_refused, need, way in (
        (transport.size == 1, "a replica to spare, but there is one rank", "Start 2 or more."),
        (why, f"a job that outlives a rank, but {why}", f"{way_out}."),
        (
            layout.dp,
            f"a number of replicas that may fall, but layout.dp is {layout.dp}",
            "Leave --dp out.",
        ),
        (
            layout.tp * layout.pp * layout.cp > 1,
            f"a replica on each rank, but {sizes}",
            "Leave these options out.",
        ),
        (
            not is_together,
            f"ranks that end each step together, but replication.mode is {replication.mode}",
            "Set it to all-reduce or master, or to server with replication.update=sync.",
        ),
        (
            replication.algorithm == "shared",
            "ranks without shared memory, but replication.algorithm is shared",
            "Set it to auto.",
        ),
    ):
        if is_refused:
            raise on_every_rank(ConfigError(f"run.on_failure=continue needs {need}.", way))
