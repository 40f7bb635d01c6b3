"""The checkpoints of a living run: when one is saved, which stay, and whether memory for copies is left."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from mpitrain.errors import ConfigError, MpitrainError, TrainingError, gigabytes
from mpitrain.machine import process
from mpitrain.parallel.replication.protocol import StateBuffer
from mpitrain.run.checkpoint import saving
from mpitrain.run.checkpoint.manifest import CHECKPOINTS, Manifest, drop_old
from mpitrain.run.trainer import Trainer

if TYPE_CHECKING:
    from mpitrain.run.loop import Run

WORTH_COPYING = 1 << 20
"""Bytes of a rank from which checkpoint.background=auto saves in the background."""


class Checkpoints:
    """Saves checkpoints of a run: every checkpoint.every steps, and where it stops or ends.

    With checkpoint.background, and memory for copies, a thread writes what was copied between two
    steps. A save that is due meanwhile is skipped. The last save of a run makes no copies.

    newest  the step of the newest checkpoint, which may be on its way; None: there is none
    """

    def __init__(self, run: "Run", newest: int | None):
        self._run, self.newest, self._skipped = run, newest, 0
        self._best = run.best.step if run.config.checkpoint.best else -1
        self._on_its_way: saving.Save | None = None
        self._unrecorded: saving.Save | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write the checkpoint that is on its way."""
        return self._on_its_way is not None and self._on_its_way.has_failed

    def pause(self, step: int, stop: bool) -> None:
        """Save what is due between two steps; stop: whether the run stops here."""
        run, every = self._run, self._run.config.checkpoint.every
        self._record()
        if stop or step == run.steps:
            self.save(step)
        elif every and step and step % every == 0 and self.newest != step:
            run.met_at = step
            with run.recorder.pausing("checkpoint"):
                # A checkpoint that stays for ever waits for the one before.
                if not self._stays(step) and not self._is_over():
                    self._skipped += 1
                else:
                    self._wait()
                    self._begin(step, in_background=True)

    def save(self, step: int) -> None:
        """Save a checkpoint of this step, unless there is one; return when it is published."""
        self._run.met_at = step
        with self._run.recorder.pausing("checkpoint"):
            self._wait()
            if self.newest != step:
                self._begin(step, in_background=False)
                self._wait()

    def keep_best(self, step: int) -> None:
        """Save the step of the best evaluation; the checkpoint that was the best is then removed."""
        with self._run.recorder.pausing("checkpoint"):
            if self.newest != step:
                self._wait()
            self._best = step
            if self.newest != step:
                self._begin(step, in_background=True)
        if not self._unrecorded:
            self._drop_old()

    def close(self) -> None:
        """Leave no thread that writes; after an error that all ranks raise, publish what is on its way."""
        error, save = sys.exc_info()[1], self._on_its_way
        if save and isinstance(error, MpitrainError) and error.agreed:  # All ranks are here.
            with suppress(MpitrainError):
                save.wait()
        elif save:
            save.give_up()

    def _is_over(self) -> bool:
        """Return whether the save that was on its way is published; collective."""
        save = self._on_its_way
        return save is None or all(self._run.transport.gather_text(save.is_published))

    def _stays(self, step: int) -> bool:
        """Return whether a checkpoint stays although it is old."""
        every = self._run.config.checkpoint.keep_every
        return step == self._best or bool(every and step % every == 0)

    def _begin(self, step: int, in_background: bool) -> None:
        """Begin a save while none is on its way; collective."""
        run, trainer, config = self._run, self._run.trainer, self._run.config
        run.reach("save", step)
        run.take_snapshot(step)
        trainer.sync_parameters()
        scalars = trainer.replication.step_end.skips.scalars()
        base = trainer.begun_from if config.lora.rank else {}
        sizes = trainer.resolved.axes.sizes
        manifest = Manifest(run.after(step), sizes, scalars, base=base, meaning=run.meaning)
        manifest = manifest._replace(metrics=run.written)
        room = room_for_copies(trainer) if in_background and config.checkpoint.background else None
        with (
            copying(
                f"the checkpoint of step {step}, which is copied and then written in the background",
                "Add --set checkpoint.background=false, and go on with --resume.",
            )
            if room
            else nullcontext()
        ):
            self._on_its_way = self._unrecorded = save = saving.begin(
                run.folder / CHECKPOINTS,
                state_to_save(trainer),
                trainer.storage,
                run.transport,
                trainer.backend,
                manifest,
                config.checkpoint.keep,
                self._stays,
                room,
                WORTH_COPYING if config.checkpoint.background == "auto" else 0,
                lambda: run.reach("piece", step),
            )
        self.newest = step
        if save.is_copied:
            run.reach("snapshot", step)
            save.start(run.reach)
        else:
            self._wait()

    def _wait(self) -> None:
        """Wait until no save is on its way; collective.

        raises  TrainingError on every rank if one could not be written
        """
        save, self._on_its_way = self._on_its_way, None
        if save:
            save.wait()
            self._record()

    def _record(self) -> None:
        """Record the checkpoint that was begun last, once this rank knows that it is published."""
        save, run = self._unrecorded, self._run
        if not save or not save.is_published:
            return
        self._unrecorded = None
        run.limit.saved(save.seconds)
        run.record(
            {
                "event": "checkpoint",
                "step": save.step,
                "checkpoint_s": save.seconds,
                "checkpoint_pause_s": min(save.paused_s, save.seconds),
                "checkpoint_bytes": save.nbytes,
                **({"checkpoints_skipped": self._skipped} if self._skipped else {}),
            }
        )
        for watcher in run.watchers:
            watcher.on_checkpoint(save.step, save.path)
        self._drop_old()

    def _drop_old(self) -> None:
        """Remove the checkpoint that was the best before, unless its successor is on its way."""
        run, config = self._run, self._run.config.checkpoint
        if run.transport.rank == 0 and config.best:
            with suppress(OSError):
                drop_old(run.folder / CHECKPOINTS, config.keep, self._stays)


@contextmanager
def copying(what: str, way_out: str) -> Iterator[None]:
    """Turn a lack of memory for copies into an error that names the key which asks for them."""
    try:
        yield
    except MemoryError as error:
        raise TrainingError(f"There is no memory for {what}: {error}.", way_out) from None


def state_to_save(trainer: Trainer) -> Sequence[StateBuffer]:
    """Return the arrays that checkpoints have: with adapters not the model under them; collective."""
    kept = trainer.replication.kept()
    if not trainer.config.lora.rank:
        return kept
    from mpitrain.run.initial import of_adapters

    return of_adapters(kept)


def room_for_copies(trainer: Trainer) -> saving.HostRoom:
    """Return the memory of this rank's host for copies of a checkpoint, besides snapshots; collective."""
    limit, is_host = trainer.config.memory.limit_gb, trainer.backend.kind != "cuda"
    held = sum(trainer.replication.held_by_kind().values()) + trainer.counted.peak
    held += trainer.snapshot_bytes
    return saving.HostRoom(process.free_memory("cpu"), int(limit * 1e9 * is_host), held)


def snapshot_bytes(trainer: Trainer) -> int:
    """Return the bytes of the snapshots that run.on_spike=back needs on this rank; collective."""
    if trainer.config.run.on_spike != "back":
        return 0
    from mpitrain.run.checkpoint.snapshot import KEPT, arrays_of

    trainer.sync_parameters()
    return KEPT * sum(array.nbytes for array in arrays_of(trainer))


def check_copies(trainer: Trainer, copied: int) -> None:
    """Raise an agreed ConfigError if copies that the configuration asks for do not fit in memory.

    copied  bytes of the copies of run.copies_every on this rank
    """
    run, does_save = trainer.config.run, trainer.config.checkpoint.background is True
    trainer.snapshot_bytes = snapshots = snapshot_bytes(trainer) + copied
    if not does_save and run.on_spike != "back" and not run.copies_every:
        return
    trainer.sync_parameters()
    room = room_for_copies(trainer)
    # The first step touches pages that are only reserved now.
    reserved = snapshots if trainer.backend.kind == "cuda" else room.held
    room = room._replace(free=room.free - reserved)
    kept = state_to_save(trainer) if does_save else []
    _, short = saving.share_out(kept, trainer.storage, trainer.transport, room)
    if short:
        keys = [("checkpoint.background=true", "checkpoint.background to auto")] * does_save
        keys += [("run.on_spike=back", "run.on_spike to skip")] * (run.on_spike == "back")
        keys += [("run.copies_every", "run.copies_every to 0")] * bool(run.copies_every)
        names, ways = (" and ".join(words) for words in zip(*keys, strict=True))
        copied, left = (n + snapshots * short.ranks for n in (short.needed, short.room))
        needed, room_left = gigabytes(copied, max(0, left))
        (missing,) = gigabytes(copied - left)
        raise ConfigError(
            f"With {names} {short.ranks} rank(s) of {short.host} copy {needed} of their state, but "
            f"{room_left} are left for that.",
            f"Set {ways}, or find {missing} more: raise memory.limit_gb, or use more hosts.",
        ).on_every_rank()
