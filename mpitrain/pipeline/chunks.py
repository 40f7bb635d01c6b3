"""The units of a model, cut into chunks for the stages of a pipeline: one function of every rank."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.config import Lora
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, are_units, forward_only, freeze
from mpitrain.layers.recomputed import with_recomputation
from mpitrain.models.targets import adapt
from mpitrain.parallel.tensor.layer_factory import LayerFactory, check_saved, check_units
from mpitrain.pipeline.partition import assign_units, cut

Units = Sequence[Unit] | Callable[[LayerFactory], Sequence[Unit]]
"""A model, or a function of a layer factory that returns one."""


NO_LORA = Lora()


class Chunks(NamedTuple):
    """A model that is cut for a pipeline.

    model   all units, in order
    chunks  the units of each chunk
    tied   {full name of a tied tensor: its stages}, for tensors on several stages
    """

    model: list[Unit]
    chunks: list[list[Unit]]
    tied: dict[str, list[int]]

    def first(self, units: Sequence[Unit]) -> int:
        """Return the number of a stage's units that are frozen and run no backward."""
        before = {unit.name for unit in self.model[: forward_only(self.model)]}
        return sum(unit.name in before for unit in units)


def cut_in_chunks(
    units: Units,
    layers: LayerFactory,
    stage_of: Sequence[int],
    partition: str,
    frozen: Sequence[str] = (),
    lora: Lora = NO_LORA,
) -> Chunks:
    """Make the units with a rank's layer factory, and cut them.

    stage_of   the stage of each chunk
    partition  as pipeline.partition, but not "time"
    frozen     as model.freeze
    lora       the section [lora]
    raises     ConfigError if the units do not fit each other, the ranks or the partition
    """
    made = units(layers) if callable(units) else units
    if not are_units(made):
        raise ConfigError(
            f"A model is a list of units, at least one, but this is {made!r:.60}.",
            "Pass the units, or a function that returns them.",
        )
    model = freeze(adapt(made, lora, layers), frozen)
    check_units(model, layers.rows)
    check_saved(layers)
    chunks, tied = assign_units(model, cut(model, len(stage_of), partition), stage_of)
    return Chunks(
        model, with_recomputation(chunks, layers.memory.segment, layers.rows.recomputing), tied
    )
