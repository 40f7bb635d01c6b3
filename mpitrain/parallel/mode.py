"""What a replication mode says of itself: the arguments of its memory formula, and the keys that it needs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpitrain.config import Replication as Settings
from mpitrain.parallel.grid import Axes


class Sizes(NamedTuple):
    """The arguments of a memory formula.

    settings  the section `replication` of the configuration
    axes      the number of ranks along each axis
    shards    ranks that divide a replica's state: ZeRO's sharding group
    length    elements of the flat parameter buffer of a stage, as the mean over the stages
    largest   elements of the largest unit, or of the mean chunk of several on a stage
    master    bytes of a parameter, which are those of its gradient, too
    mirror    bytes of the rounded copy of a parameter; 0 in full precision
    state     bytes of optimizer state per parameter, as the mean over trained parameters
    frozen    elements of the frozen parameters of a stage, which are not part of `length`
    slot      as `largest`, for frozen parameters
    """

    settings: Settings
    axes: Axes
    shards: int
    length: float
    largest: float
    master: int
    mirror: int
    state: float
    frozen: float = 0
    slot: float = 0

    @property
    def replica(self) -> float:
        """The bytes of a replica that is not sharded: parameters, mirror, gradients and state."""
        return (2 * self.master + self.mirror + self.state) * self.length + self.fixed

    @property
    def fixed(self) -> float:
        """The bytes of all frozen parameters, in the dtype with which layers compute."""
        return self.computed * self.frozen

    @property
    def computed(self) -> int:
        """Bytes of a parameter in the dtype with which layers compute."""
        return self.mirror or self.master


def has_outer(settings: Settings) -> bool:
    """Return whether local SGD has an outer optimizer (DiLoCo), which keeps two more buffers."""
    return settings.outer_lr != 1 or settings.outer_momentum != 0


SINGLE_RANKS: Mapping[str, Any] = {
    "replication.wire": "none",
    "replication.zero": 0,
    "layout.tp": 1,
    "layout.pp": 1,
    "layout.cp": 1,
    "layout.ep": 1,
}
"""{key: value} that all modes need whose replicas are single ranks with whole gradients."""
