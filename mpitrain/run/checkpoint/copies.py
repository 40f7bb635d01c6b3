"""Memory for copies of the state: of checkpoints that are saved in the background, snapshots, and copies on neighbours."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpitrain.errors import ConfigError, TrainingError, gigabytes
from mpitrain.machine import process
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.run.checkpoint import saving
from mpitrain.run.trainer import Trainer


@contextmanager
def copying(what: str, way_out: str) -> Iterator[None]:
    """Turn a lack of memory for copies into an error that names the key which asks for them."""
    try:
        yield
    except MemoryError as error:
        raise TrainingError(f"There is no memory for {what}: {error}.", way_out) from None


def state_to_save(trainer: Trainer) -> Sequence[StateBuffer]:
    """Return the arrays that checkpoints have: with adapters not the model under them; collective."""
    kept = trainer.replica.state()
    if not trainer.config.lora.rank:
        return kept
    from mpitrain.run.initial import of_adapters

    return of_adapters(kept)


def room_for_copies(trainer: Trainer) -> saving.HostRoom:
    """Return the memory of this rank's host for copies of a checkpoint, besides snapshots; collective."""
    limit, is_host = trainer.config.memory.limit_gb, trainer.backend.kind != "cuda"
    held = sum(trainer.replica.held_by_kind().values()) + trainer.job.counts.peak
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
