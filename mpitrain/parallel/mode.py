"""What a replication mode says of itself: the arguments of its memory formula, and refused keys."""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.config import Replication as Settings
from mpitrain.errors import ConfigError
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


def first(*rules: Callable[[Config], ConfigError | None]) -> Callable[[Config], ConfigError | None]:
    """Join several refusals of a mode into one, which returns the first error."""
    return lambda config: next(filter(None, (rule(config) for rule in rules)), None)


def only(key: str, others: str, **needed: str | int) -> Callable[[Config], ConfigError | None]:
    """Return a refusal of all configurations in which a key does not have the value that it needs.

    key     the key that selected the mode, for the message
    others  a value of `key` with which the other keys may have any value, for the message
    needed  {section__key: value}
    """

    def rule(config: Config) -> ConfigError | None:
        values = config.flat()
        title = {"replication.mode": "Mode", "pipeline.schedule": "Schedule"}[key]
        for name, value in needed.items():
            other = name.replace("__", ".")
            if values[other] != value:
                return ConfigError(
                    f"{title} {values[key]} needs {other} {value}, but it is {values[other]}.",
                    f"Set {other} to {value}, or {key} to {others}.",
                )
        return None

    return rule


def of_zero(config: Config) -> ConfigError | None:
    """Return the error about a key that the ZeRO stage does not support, or None; for all modes."""
    settings, compute = config.replication, config.precision.compute
    if settings.wire != "none" and settings.zero > 1:
        return ConfigError(
            "Wire formats carry sums that every replica has whole, but with replication.zero "
            f"{settings.zero} none has, and replication.wire is {settings.wire}.",
            "Set replication.wire to none, or replication.zero to 0 or 1.",
        )
    if settings.shard != "all" and not settings.zero:
        return ConfigError(
            f"replication.shard {settings.shard} says among whom ZeRO divides, but replication.zero is 0.",
            "Set replication.zero to 1, 2 or 3, or replication.shard to all.",
        )
    if settings.gather != "none" and (settings.zero != 3 or compute != "float32"):
        return ConfigError(
            f"replication.gather {settings.gather} is of float32 parameters that no rank has whole, but "
            f"replication.zero is {settings.zero} and precision.compute {compute}.",
            "Set replication.gather to none, or replication.zero to 3 and precision.compute to float32.",
        )
    return None


without_layouts = only(
    "replication.mode",
    "all-reduce",
    replication__wire="none",
    replication__zero=0,
    layout__tp=1,
    layout__pp=1,
    layout__cp=1,
    layout__ep=1,
)
"""The refusal of all modes whose replicas are single ranks with whole gradients."""


def refuse_float16(config: Config) -> ConfigError | None:
    """Return the error of a mode whose ranks have no step in common, if there is a loss scale."""
    settings = config.replication
    if config.precision.compute != "float16":
        return None
    update = f" with replication.update {settings.update}" if settings.mode == "server" else ""
    return ConfigError(
        "In float16 all ranks change the loss scale together after each step, but in mode "
        f"{settings.mode}{update} they have no step in common.",
        "Set precision.compute to bfloat16, or replication.mode to all-reduce, master, or server with update sync.",
    )
