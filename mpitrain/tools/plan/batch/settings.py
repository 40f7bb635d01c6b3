"""The keys that run a global batch in micro-batches that fit."""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.run.resolve import Resolved, with_micro_batches
from mpitrain.tools.plan.batch.noise import Noise


class BatchSetting(NamedTuple):
    """A global batch, its number of micro-batches, and the rows of the largest of these."""

    size: int
    micro_batches: int
    rows: int

    @property
    def keys(self) -> str:
        """The keys to set, as options of a command."""
        return f"--set batch.size={self.size} --set batch.micro_batches={self.micro_batches}"


def setting(
    resolved: Resolved, size: int, rows: int, fits: Callable[[Resolved], bool]
) -> BatchSetting | None:
    """Return the setting with the fewest micro-batches that fits; None if there is none.

    It sends no message.

    size  global batch
    rows  largest number of rows in a micro-batch
    fits  whether the memory suffices for a job
    """
    own = -(-size // resolved.axes.dp)
    batch = resolved.config.batch.model_copy(update={"size": size})
    job = resolved._replace(config=resolved.config.model_copy(update={"batch": batch}))
    for count in range(max(1, -(-own // rows)), size // resolved.axes.dp + 1):
        candidate = with_micro_batches(job, count)
        if candidate and fits(candidate):
            return BatchSetting(size, count, -(-own // count))
    return None


def critical_size(resolved: Resolved, noise: Noise | None, unit: int) -> int | None:
    """Return the global batch nearest to the noise scale; None if that is not known.

    unit  rows that divide a micro-batch
    """
    if noise is None or noise.is_uncertain:
        return None
    step = resolved.axes.dp * unit
    return max(1, round(noise.rows / step)) * step
