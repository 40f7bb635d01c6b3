"""Descriptor of a replication mode: its constructor, its costs, and the keys that it refuses."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.config import Replication as Settings
from mpitrain.errors import ConfigError
from mpitrain.parallel.grid import Axes
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.traffic import Formula


class Sizes(NamedTuple):
    """The arguments of a memory formula. Sizes of elements are in bytes.

    settings  the section `replication` of the configuration
    axes      the number of ranks along each axis
    shards    ranks that divide a replica's state: ZeRO's sharding group
    length    elements of the flat parameter buffer of a stage, as the mean over the stages
    largest   elements of the largest unit, or of the mean chunk of several on a stage
    master    size of a parameter, and of its gradient
    mirror    size of a rounded copy of a parameter; 0 in full precision
    state     size of the optimizer's state of a parameter, as the mean over trained parameters
    frozen    elements of the frozen parameters of a stage, which `length` does not count
    slot      as `largest`, of frozen parameters
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
        """The bytes of parameters, rounded copy, gradients and optimizer state, all of them."""
        return (2 * self.master + self.mirror + self.state) * self.length + self.fixed

    @property
    def fixed(self) -> float:
        """The bytes of all frozen parameters, which have no master in half precision."""
        return self.computed * self.frozen

    @property
    def computed(self) -> int:
        """Bytes of a parameter in the dtype with which layers compute."""
        return self.mirror or self.master


class Mode(NamedTuple):
    """Descriptor of a replication mode; an entry of modes.py.

    help      phrase about the mode, for the help of its key
    make      (context) -> the mode on this rank; collective
    memory    (sizes) -> bytes of parameters, gradients and optimizer state on a rank, as the mean
              over the ranks; without scratch of reductions
    traffic   (settings) -> formula of the bytes that the busiest rank sends in a step; None if it
              depends on the machine or on the schedule
    refusal   (configuration) -> error that names a key that the mode does not support, or None
    servers   (settings) -> number of the last ranks, which compute no rows
    records   (settings) -> fields of StepResult that metrics.jsonl has only in this mode
    exchange  (settings) -> steps between two exchanges of stop requests
    stages    {replication.zero: descriptor} for each ZeRO stage of the mode
    variants  {end of the mode's name in `mpitrain compare`: setting}; empty: there is one variant
    """

    help: str
    make: Callable[[ReplicationContext], Replication]
    memory: Callable[[Sizes], float]
    traffic: Callable[[Settings], Formula | None]
    refusal: Callable[[Config], ConfigError | None]
    servers: Callable[[Settings], int] = lambda settings: 0
    records: Callable[[Settings], tuple[str, ...]] = lambda settings: ()
    exchange: Callable[[Settings], int] = lambda settings: 1
    stages: Mapping[int, "Mode"] = {}
    variants: Mapping[str, str] = {}


def unknown(settings: Settings) -> None:
    """Return None: there is no formula for the bytes that the mode sends."""


def nothing(config: Config) -> None:
    """Return None: the mode refuses no keys."""


def first(*rules: Callable[[Config], ConfigError | None]) -> Callable[[Config], ConfigError | None]:
    """Return the rule that returns the first error of these rules."""
    return lambda config: next(filter(None, (rule(config) for rule in rules)), None)


def only(key: str, others: str, **needed: str | int) -> Callable[[Config], ConfigError | None]:
    """Return the rule that keys have one value each, written as `section__key`.

    key     the key that chose the mode, for the message
    others  its value that supports every value of the keys
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
    """Refuse keys that only some ZeRO stages read; in all modes."""
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
