"""A trainer's checkpoints in one call each."""

from mpitrain.run.checkpoint import loading, saving
from mpitrain.run.checkpoint.manifest import Manifest


def publish(*arguments):
    """Write one in the step; arguments of `saving.begin`. Returns its path."""
    save = saving.begin(*arguments)
    save.wait()
    return save.path


def save(folder, trainer, done, keep):
    """Write one as a run does."""
    trainer.sync_parameters()
    return publish(
        folder,
        trainer.replica.state(),
        trainer.storage,
        trainer.transport,
        trainer.backend,
        manifest(trainer, done),
        keep,
    )


def blocks_of(nbytes, monkeypatch):
    """Let new manifests have digests of blocks of this size."""
    defaults = {**Manifest._field_defaults, "block": nbytes}
    monkeypatch.setattr(Manifest.__new__, "__defaults__", tuple(defaults.values()))


def manifest(trainer, done, **more):
    axes = trainer.job.axes.sizes
    return Manifest(done, axes, trainer.replica.skips.scalars(), **more)


def load(path, trainer):
    """Read one as a run does; returns what was loaded."""
    found = loading.read_beside(trainer.transport, path)
    found = loading.load(
        found,
        trainer.replica.state(),
        trainer.storage,
        trainer.transport,
        trainer.backend,
        trainer.job.axes.sizes,
    )
    trainer.replica.restore(found.manifest.scalars)
    return found
