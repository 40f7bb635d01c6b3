"""The tables of replication modes, ZeRO stages and asynchronous pipelines."""

from functools import partial

from mpitrain.config import Config
from mpitrain.config import Replication as Settings
from mpitrain.errors import ConfigError
from mpitrain.models.table import is_tied
from mpitrain.parallel.buckets import all_reduce
from mpitrain.parallel.mode import (
    ALL_REDUCE,
    GOSSIP,
    LOCAL,
    MASTER,
    SERVER,
    Mode,
    Sizes,
    by_micro_batch,
    by_use,
    first,
    has_outer,
    of_zero,
    once,
    only,
    zero_traffic,
)
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.tables import Table, on_use
from mpitrain.transport.agreement import on_all_ranks


def _is_late(settings: Settings) -> bool:
    """Return whether servers may update before all workers have finished the step."""
    return settings.update == "async" or (settings.update == "bounded" and settings.staleness > 0)


def _server_or_worker(replica: ReplicationContext) -> Replication:
    late = _is_late(replica.config.replication)
    home = "async_servers:asynchronous" if late else "servers:synchronous"
    return on_use(f"mpitrain.parallel.{home}")(replica)


def _memory_of_servers(sizes: Sizes) -> float:
    """Return the mean bytes of a rank: all servers share one replica's state, workers have none.

    Synchronous servers receive the workers' gradients in a separate buffer.
    """
    master, dp = sizes.master, sizes.axes.dp
    workers = dp * (2 * master + sizes.mirror)
    frozen = dp * sizes.fixed
    arriving = 0 if _is_late(sizes.settings) else master
    trained = (workers + 2 * master + arriving + sizes.state) * sizes.length
    return (trained + frozen) / sizes.axes.ranks


def _refuse_float16(config: Config) -> ConfigError | None:
    settings = config.replication
    if config.precision.compute != "float16":
        return None
    update = f" with replication.update {settings.update}" if servers_of(config) else ""
    return ConfigError(
        "In float16 all ranks change the loss scale together after each step, but in mode "
        f"{settings.mode}{update} they have no step in common.",
        "Set precision.compute to bfloat16, or replication.mode to all-reduce, master, or server with update sync.",
    )


def _refuse_ties_and_float16(config: Config) -> ConfigError | None:
    schedule = config.pipeline.schedule
    if is_tied(config):
        return ConfigError(
            f"With schedule {schedule} each stage updates by itself, but model.tied has two share a tensor.",
            "Set model.tied to false, or pipeline.schedule to 1f1b.",
        )
    if config.precision.compute == "float16":
        return ConfigError(
            f"With schedule {schedule} no stage waits until all know of an overflow, but the loss scale of float16 adapts to "
            "them.",
            "Set precision.compute to bfloat16 or float32, or pipeline.schedule to 1f1b.",
        )
    return None


_WITHOUT_LAYOUTS = only(
    "replication.mode",
    "all-reduce",
    replication__wire="none",
    replication__zero=0,
    layout__tp=1,
    layout__pp=1,
    layout__cp=1,
)

_OF_STREAMS = first(
    _refuse_ties_and_float16,
    only(
        "pipeline.schedule",
        "1f1b",
        replication__mode="all-reduce",
        replication__zero=0,
        replication__wire="none",
        layout__cp=1,
    ),
)

ZERO: Table[int, Mode] = Table(
    {
        1: Mode(
            help="the optimizer state",
            make=on_use("mpitrain.parallel.zero:zero_1"),
            # In half precision the float32 parameters are sharded from stage 1 on.
            memory=lambda of: (
                (
                    (of.master / (of.shards if of.mirror else 1) + of.master + of.mirror)
                    + of.state / of.shards
                )
                * of.length
                + of.fixed
            ),
            traffic=zero_traffic("2 {0} S", once),
        ),
        2: Mode(
            help="also gradients",
            make=on_use("mpitrain.parallel.zero:zero_2"),
            memory=lambda of: (
                (
                    (of.master / (of.shards if of.mirror else 1) + of.mirror)
                    + (of.master + of.state) / of.shards
                )
                * of.length
                + of.master * of.largest
                + of.fixed
            ),
            traffic=zero_traffic("(m+1) {0} S", by_micro_batch),
        ),
        3: Mode(
            help="also parameters",
            make=on_use("mpitrain.parallel.zero:zero_3"),
            memory=lambda of: (
                (2 * of.master + of.state) / of.shards * of.length
                + (of.master + of.computed) * of.largest
                + of.fixed / of.shards
                + of.computed * of.slot
            ),
            traffic=zero_traffic(
                "{0} of 3 m S, of which the last two units travel only 2 m times, the first two 2 m + 1 times",
                by_use,
            ),
        ),
    }
)
"""{replication.zero: row}: the ZeRO stages, which only mode all-reduce supports."""

MODES: Table[str, Mode] = Table(
    {
        "all-reduce": Mode(
            help="each rank updates from the sum of all gradients",
            make=all_reduce,
            memory=lambda of: of.replica,
            traffic=lambda settings: ALL_REDUCE.get(settings.algorithm),
            stages=ZERO,
        ),
        "master": Mode(
            help="rank 0 alone updates",
            make=on_use("mpitrain.parallel.master:master"),
            memory=lambda of: of.replica - of.state * of.length * (1 - 1 / of.axes.ranks),
            traffic=lambda settings: MASTER,
            refusal=_WITHOUT_LAYOUTS,
        ),
        "server": Mode(
            help="parameter servers, which compute no rows, update",
            make=_server_or_worker,
            memory=_memory_of_servers,
            traffic=lambda settings: SERVER[settings.update],
            refusal=first(
                lambda config: _refuse_float16(config) if _is_late(config.replication) else None,
                _WITHOUT_LAYOUTS,
            ),
            servers=lambda settings: settings.servers,
            records=lambda settings: ("lead", "staleness") if settings.update != "sync" else (),
            variants={
                update: f"replication.update={update}" for update in ("sync", "async", "bounded")
            },
        ),
        "local": Mode(
            help="local SGD; workers update by themselves and average parameters every "
            "replication.period steps",
            make=on_use("mpitrain.parallel.averaging:local_sgd"),
            memory=lambda of: (
                of.replica + (3 if has_outer(of.settings) else 1) * of.master * of.length
            ),
            traffic=lambda settings: LOCAL,
            refusal=first(_refuse_float16, _WITHOUT_LAYOUTS),
            exchange=lambda settings: settings.period,
        ),
        "gossip": Mode(
            help="workers update by themselves and average with one neighbour after each step",
            make=on_use("mpitrain.parallel.averaging:gossip"),
            memory=lambda of: of.replica + of.master * of.length,
            traffic=lambda settings: GOSSIP,
            refusal=first(_refuse_float16, _WITHOUT_LAYOUTS),
            exchange=lambda settings: settings.period,
        ),
    }
)
"""{replication.mode: row}. A new mode needs no more than a row here."""

STREAMS: Table[str, Mode] = Table(
    {
        "async": Mode(
            help="(PipeDream) updates after every micro-batch",
            make=on_use("mpitrain.parallel.weight_stashing:pipedream"),
            # Stage s of p stores p - s versions of the parameters with which layers compute.
            memory=lambda of: of.replica + (of.axes.pp - 1) / 2 * of.computed * of.length,
            refusal=_OF_STREAMS,
        ),
        "async-2bw": Mode(
            help="(PipeDream-2BW) updates once a step, with gradients at the parameters of the "
            "step before",
            make=on_use("mpitrain.parallel.weight_stashing:pipedream_2bw"),
            memory=lambda of: of.replica + of.computed * of.length,
            refusal=_OF_STREAMS,
        ),
    }
)
"""{pipeline.schedule: row}, for asynchronous pipelines. Their replicas use an all-reduce."""


def mode_of(config: Config) -> Mode:
    settings = config.replication
    mode = MODES[settings.mode]
    return STREAMS.get(config.pipeline.schedule, mode.stages.get(settings.zero, mode))


def replication_for(replica: ReplicationContext) -> Replication:
    config = replica.config
    made = mode_of(config).make(replica)
    for table, name in ((MODES, config.replication.mode), (STREAMS, config.pipeline.schedule)):
        if name in table and table.is_added(name):
            on_all_ranks(
                replica.grid.transport,
                partial(table.made, name, "mode", lambda: made, "a Replication", _is_replication),
            )
    return made


def _is_replication(made: object) -> bool:
    return isinstance(made, Replication)


def refusal_of(config: Config) -> ConfigError | None:
    """Return the error about a key that the configured mode does not support, or None."""
    return first(of_zero, mode_of(config).refusal)(config)


def servers_of(config: Config) -> int:
    """Return the number of parameter servers, which are the last ranks and compute no rows."""
    return mode_of(config).servers(config.replication)


def is_synchronous(config: Config) -> bool:
    """Return whether the ranks take steps together, with one update of all."""
    mode, settings = mode_of(config), config.replication
    rare = settings.model_copy(update={"period": 2})
    is_stream = config.pipeline.schedule in STREAMS
    return not (is_stream or mode.records(settings) or mode.exchange(rare) > 1)


def check_synchronous(config: Config, reason: str) -> None:
    """Raise ConfigError for a mode or schedule whose ranks update by themselves.

    reason  a clause that says who needs steps of all ranks together, for the message
    """
    if not is_synchronous(config):
        schedule = config.pipeline.schedule
        key = "pipeline.schedule" if schedule in STREAMS else "replication.mode"
        raise ConfigError(
            f"{reason} steps that all ranks take together, but {key} is {config.flat()[key]}.",
            "Set pipeline.schedule=1f1b and replication.mode=all-reduce.",
        )
