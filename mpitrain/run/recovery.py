"""Going on after the loss of ranks: what a rank keeps of its run, and how the next trainer is filled.

PeerLost in any call of the run
  each rank      forgets the transports and the trainer, and keeps data and state
  living ranks   connect; spares take the places of lost ranks, and the living ranks of a replica
                 that stays damaged wait as spares                          Recovery.go_on
  then the run starts anew in its folder, as a resumed one does, but
  ranks          copy the newest state of which they hold all, be it their own or that of
                 `NeighbourCopies`, unless the newest checkpoint is newer            Recovery.built
"""

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.config import Config, Layout
from mpitrain.config.faults import of_ranks
from mpitrain.data import Source, Unopened
from mpitrain.errors import ConfigError, MpitrainError, PeerLost, TrainingError
from mpitrain.optim import RULES
from mpitrain.optim.tensors import TensorWise
from mpitrain.parallel.grid import Axes
from mpitrain.parallel.modes import is_synchronous, servers_of
from mpitrain.run.build import build
from mpitrain.run.checkpoint.copies import copying
from mpitrain.run.checkpoint.held import (
    CompleteState,
    Held,
    NeighbourCopies,
    digest,
    fill,
    newest,
    units_of_all,
)
from mpitrain.run.checkpoint.manifest import Done, step_of
from mpitrain.run.checkpoint.snapshot import changed
from mpitrain.run.job import Job
from mpitrain.run.run_dir import check_idle
from mpitrain.trace.timeline import TRACE
from mpitrain.transport.base import Transport
from mpitrain.transport.places import change

LOOK = 0.05
"""Seconds between two looks whether the process of a lost rank has left its lock."""


class Recovery:
    """What one rank keeps of a run with run.on_failure=continue.

    facts         of this start for the metrics; {} before a loss
    copied_bytes  bytes of the snapshots and copies of this rank
    is_under_way  whether ranks were lost and no step has begun since
    """

    def __init__(self, config: Config, transport: Transport):
        """transport: the root; raises ConfigError, on every rank, if the run cannot lose a rank."""
        if not transport.joins:
            check(config, transport)
            ranks = range(transport.size)
            transport.keep_together([replica_of(config, rank, transport.size) for rank in ranks])
        self._config, self._root, self._folder = config, transport, ""
        self._source: Source | Unopened | None = None
        self._own: list[Held] = []
        self._copied: list[Held] = []
        self._copies: NeighbourCopies | None = None
        self._saved: int | None = None
        self._began, self._timer, self._doing = time.monotonic(), threading.Timer(0, bool), ""
        self.facts: dict[str, Any] = {}
        self.copied_bytes, self.is_under_way = 0, False
        self._since = time.perf_counter()

    def built(self, transport: Transport, agreed: Job) -> Job:
        """Build the job of a start, with the state of the living ranks if that is the newest; collective."""
        complete = None
        if self.facts:
            self._lap("agree")
            agreed, complete = self._chosen(agreed)
        job = build(transport, agreed, source=self._source, fills=complete is not None)
        self._lap("build")
        if complete:
            fill(job.trainer, complete, [*self._own, *self._copied])
            self._lap("fill")
            job = replace(job, done=complete.facts.done)
        self._hold(job)
        return job

    def _lap(self, part: str) -> None:
        """Note the seconds since the last part of this recovery, if it is one."""
        now = time.perf_counter()
        if self.facts:
            self.facts["parts_s"][part] = now - self._since
        self._since = now

    def _hold(self, job: Job) -> None:
        """Keep a new job's data and state; the state of the job before is given up; collective."""
        trainer, config = job.trainer, job.trainer.config
        transport, skips = trainer.transport, trainer.replica.skips
        everyone = units_of_all(trainer)
        state = digest(unit.name for units in everyone for unit in units)
        if config.run.copies_every and transport.size > 1:
            replicas = [place.replica for place in self._root.history[-1]]
            places = [*zip(replicas, transport.hosts, strict=True)]
            self._copies = NeighbourCopies(trainer, state, everyone, places, self._copied)
            self.copied_bytes = self._copies.nbytes
        own = []
        if updates_alone(config):
            arrays = zip(everyone[transport.rank], changed(trainer), strict=True)
            units = {unit.name: (unit.entry, kept.array) for unit, kept in arrays}
            own = [Held("ranks", state, units, job.done, skips.scalars())]
        self._source, self._own = job.source, [*self._own, *own]
        if self.facts:
            transport.barrier()  # All ranks have the state of this job, so that before may go.
        self._own = own

    @property
    def number(self) -> int:
        """This rank's rank in the whole job at the start."""
        return self._root.number

    @property
    def spares(self) -> int | None:
        """Ranks that wait for a place; None: the job began without any."""
        return self._root.spares if self._root.had_spares else None

    @property
    def seconds(self) -> float:
        """Seconds since the first start of this run began."""
        return time.monotonic() - self._began

    def begins(self, folder: Path, newest: int | None) -> int | None:
        """Take the run directory of a start; return the step of the newest checkpoint in it.

        newest  the step of the checkpoint that the start resumes from
        """
        self._folder = str(folder)
        return self._saved if self.facts.get("filled_from") in ("ranks", "copies") else newest

    def copy(self, done: Done) -> None:
        """Let `NeighbourCopies` take the state; collective."""
        if self._copies:
            way_out = "Add --set run.copies_every=0, and go on with --resume=auto."
            with (
                self._root.recorder.pausing("copies of the state"),
                copying(f"copies of step {done.step}, as run.copies_every asks", way_out),
            ):
                self._copies.take(done)

    def note(self, done: Done, scalars: Mapping[str, float], loss: float | None) -> None:
        """Note at a loss after which step the state is that of this rank."""
        self._own = [own._replace(done=done, scalars=scalars, loss=loss) for own in self._own]

    def go_on(self, law: str = "") -> Callable[[], Config]:
        """Connect the ranks that have a place, and return `configured` of their start; collective.

        law     of the error that reported the loss; "" on a spare that takes a place
        raises  TrainingError if all ranks live; PeerLost, on every rank, if no replica is whole
        """
        self._limit("connecting the living ranks")
        self._copies, self.is_under_way = None, True
        self._since = time.perf_counter()
        gc.collect()  # Tracebacks may form cycles, which would keep the old trainer.
        known = self._connected()
        folders, are_open, epochs, seconds = zip(*known, strict=True)
        before, places = self._root.history[min(filter(None, epochs)) - 1], self._root.history[-1]
        if all(place.number in self._root.living for place in before):
            raise TrainingError(f"Messages fail although no rank is lost: {law}")
        layout, size = self._config.layout, self._root.size
        if min(Counter(place.replica for place in places).values()) < whole(layout):
            raise PeerLost(
                f"No replica is whole after the loss: each needs tp {layout.tp} x pp {layout.pp} x cp {layout.cp}"
                f"{f' x ep {layout.ep}' * (layout.ep > 1)} ranks, and {len(self._root.living)} are left.",
                "Start it again with --resume=auto, on more ranks or with smaller --tp, --pp, --cp and --ep.",
            ).on_every_rank()
        lost, left, replaced = changed_places = change(before, places, self._root.living)
        self.facts = {"lost": lost, **({"left": left} if left else {}), "parts_s": {}}
        if replaced:
            self.facts |= {"replaced": replaced}
        self._began = time.monotonic() - max(seconds)
        self._folder = self._folder or next(filter(None, folders), "")
        self._source = self._source if all(are_open) else None
        # Artificial failures and delays of ranks that are lost are over.
        delay = of_ranks(
            self._config.run.delay,
            size - servers_of(self._config.replication, self._config.pipeline.schedule),
        )
        run = self._config.run.model_copy(update={"inject": "", "delay": delay})
        replication = self._config.replication
        if len({*Counter(self._root.hosts).values()}) > 1:
            # replication.shard=host needs hosts with equally many ranks.
            replication = replication.model_copy(update={"shard": "all"})
        if self._root.rank == 0:
            print(changed_places.said(len(before), size, self.spares), file=sys.stderr)
        if self._folder:
            run = run.model_copy(update={"out": self._folder})
            if self._root.rank == 0:
                self._doing = f"waiting for the lock of {self._folder}"
                self._free(Path(self._folder))
        self._doing = "building the job of the living ranks"
        self._lap("connect")
        return lambda: self._config.model_copy(update={"run": run, "replication": replication})

    def _limit(self, doing: str) -> None:
        """Begin the limit of run.recover_seconds."""
        self.over()
        self._doing = doing
        self._timer = threading.Timer(self._config.run.recover_seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _connected(self) -> list[list[Any]]:
        """Connect the living ranks, and wait while this one has no place.

        returns  of each rank the run directory, whether it has the data, the number of the places of
                 which it knew at the loss, None of a spare, and `seconds`
        """
        epoch = None if self._root.joins else len(self._root.history)
        while True:
            try:
                if not self._root.joins:
                    self._root.survivors()
                self._root.joins = False
                if self._root.is_spare:
                    self._wait()
                    epoch = None
                # A start that the loss has interrupted may have got further on some ranks.
                return self._root.gather_text(
                    [self._folder, self._source is not None, epoch, self.seconds]
                )
            except PeerLost:
                continue

    def _wait(self) -> None:
        """Give the state up, and wait for a place; this process ends if none is free until the job is over."""
        self.over()
        self._own, self._copied, self._source = [], [], None
        gc.collect()
        if not self._root.await_place():
            self._root.end_rank("")
        self._root.joins, self._since = False, time.perf_counter()
        self._limit("connecting the living ranks")

    def _free(self, folder: Path) -> None:
        """Wait until the folder is unlocked, and put the traces of the old ranks aside."""
        while True:
            with suppress(ConfigError):
                check_idle(folder)
                break
            time.sleep(LOOK)
        with suppress(OSError):
            names, number = os.listdir(folder), 1
            while f"{TRACE}-{number}" in names:
                number += 1
            os.rename(folder / TRACE, folder / f"{TRACE}-{number}")

    def _chosen(self, agreed: Job) -> tuple[Job, CompleteState | None]:
        """Choose the newest state; return what `build` needs, and what ranks hold; collective."""
        complete = newest([*self._own, *self._copied], self._root)
        saved = agreed.saved
        self._saved = step_of(Path(saved).name) if saved else None
        if not complete or complete.step < (self._saved or 0):
            self.facts |= {"filled_from": "checkpoint" if saved else "nothing"}
            return agreed, None
        facts = complete.facts
        self.facts |= {"filled_from": facts.of, "loss": facts.loss}
        done = agreed.done._replace(step=facts.done.step, samples=facts.done.samples)
        return replace(agreed, saved="", done=done), complete

    def over(self) -> None:
        """End the limit of run.recover_seconds: the next step begins, or the run has failed."""
        self._timer.cancel()
        self.is_under_way = False

    def refused(self, error: MpitrainError) -> PeerLost:
        """Return the error of a start after a loss that these ranks cannot make; they were enough before."""
        lost, size = self.facts["lost"], self._root.size
        return PeerLost(
            f"After the loss of {lost} rank(s) the other {size} cannot go on alone: {error.law}",
            "Start it again with --resume=auto on as many ranks as before.",
        ).on_every_rank()

    def _give_up(self) -> None:
        seconds = self._config.run.recover_seconds
        error = TrainingError(
            f"After a loss the run did not go on within run.recover_seconds {seconds:g}: it was {self._doing}.",
            "Start it again with --resume=auto, or raise run.recover_seconds.",
        )
        self._root.abort(error.named())


def whole(layout: Layout) -> int:
    """Return the number of ranks that have the whole state: a replica's, or those of layout.ep replicas."""
    return layout.tp * layout.pp * layout.cp * layout.ep


def replica_of(config: Config, rank: int, ranks: int) -> int:
    """Return the number of the `whole` ranks with this one; a rank that is whole, and a server, has its own."""
    layout, servers = config.layout, servers_of(config.replication, config.pipeline.schedule)
    if whole(layout) == 1:
        return rank
    dp = max(1, ranks // whole(layout)) * layout.ep
    return Axes(layout.tp, dp, layout.pp, servers, layout.cp).coords(rank).dp // layout.ep


def updates_alone(config: Config) -> bool:
    """Return whether no message changes a rank's state, so that it is whole whenever a rank is lost."""
    replication = config.replication
    is_sharded = replication.zero or config.layout.tp > 1
    has_sums = isinstance(RULES[config.optimizer.name].step, TensorWise) and is_sharded
    return replication.mode == "all-reduce" and replication.zero in (0, 3) and not has_sums


def check(config: Config, transport: Transport) -> None:
    """Raise ConfigError, on every rank, if a run of these ranks cannot lose one."""
    layout, replication = config.layout, config.replication
    size = whole(layout)
    replicas = (transport.size - servers_of(config.replication, config.pipeline.schedule)) // size
    why, _, way_out = transport.needs_all.partition("; ")
    schedule = config.pipeline.schedule
    for is_refused, need, way in (
        (
            replicas < (1 if transport.spares else 2),
            f"a replica to spare, but there is {'one rank' if transport.size == 1 else f'one of {size} rank(s)'}",
            f"Start {2 * size + servers_of(config.replication, config.pipeline.schedule)} or more.",
        ),
        (why, f"a job that outlives a rank, but {why}", f"{way_out}."),
        (
            layout.dp,
            f"a number of replicas that may fall, but layout.dp is {layout.dp}",
            "Leave --dp out.",
        ),
        (
            not is_synchronous(config.replication, config.pipeline.schedule),
            f"ranks that end each step together, but replication.mode is {replication.mode}, and pipeline.schedule {schedule}",
            "Set them to all-reduce and 1f1b, or replication.update to sync.",
        ),
        (
            replication.algorithm == "shared",
            "ranks without shared memory, but replication.algorithm is shared",
            "Set it to auto.",
        ),
    ):
        if is_refused:
            raise ConfigError(f"run.on_failure=continue needs {need}.", way).on_every_rank()
