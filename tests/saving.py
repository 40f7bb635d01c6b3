"""A trainer's checkpoints in one call each."""

from mpitrain.run.checkpoint import loading, saving


def save(folder, trainer, done, keep):
    """Write one as a run does."""
    trainer.sync_parameters()
    return saving.save(
        folder,
        trainer.replication.kept(),
        trainer.storage,
        trainer.transport,
        trainer.backend,
        done,
        trainer.resolved.axes._asdict(),
        trainer.replication.step_end.skips.scalars(),
        keep,
    ).path


def load(path, trainer):
    """Read one as a run does; returns what was loaded."""
    found = loading.read_beside(trainer.transport, path)
    found = loading.load(
        found,
        trainer.replication.kept(),
        trainer.storage,
        trainer.transport,
        trainer.backend,
        trainer.resolved.axes._asdict(),
    )
    trainer.replication.restore(found.manifest.scalars)
    return found
