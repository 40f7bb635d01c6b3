"""The configurations that `mpitrain compare` trains: one job in each mode."""

from collections.abc import Mapping, Sequence
from functools import partial

from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.config import Config, with_settings
from mpitrain.config.plugins import load
from mpitrain.errors import ConfigError, on_every_rank
from mpitrain.optim import checked
from mpitrain.parallel.grid import axes, divisor
from mpitrain.parallel.modes import servers_of
from mpitrain.run.build import build
from mpitrain.run.choices import ALGORITHMS, parse
from mpitrain.run.resolve import agree_on, resolve_here
from mpitrain.tools.bench.comparison.grammar import is_replication, settings_of
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

WARM_UP = 1
"""Steps that are not timed: the first one allocates buffers."""


def jobs(modes: Sequence[str], settings: Sequence[str], hosts: Sequence[str]) -> dict[str, Config]:
    """Return the configuration of each mode. It sends no message.

    settings  section.key=value for all modes; a mode's own settings take precedence
    hosts     host of every rank, by rank
    raises    ConfigError if a mode does not exist or cannot run on these ranks, or if a plugin
              cannot be imported
    """
    tables = with_settings({}, [*settings])
    load(tables)  # Plugins add modes.
    set_keys = {f"{section}.{key}" for section, values in tables.items() for key in values}
    own = {mode: settings_of(mode, set_keys) for mode in modes}
    if len(hosts) == 1 and all(map(is_replication, modes)):
        raise ConfigError(
            "compare measures what ranks send each other, and one rank sends nothing.",
            "mpitrain launch -n 2 -- compare",
        )
    configs, refused = {}, {}
    for mode, changes in own.items():
        try:
            configs[mode] = _job([*settings, *changes], hosts)
        except ConfigError as error:
            refused[mode] = error
    laws = {refusal.law for refusal in refused.values()}
    for mode, refusal in refused.items():
        if not configs and len(laws) == 1 and is_replication(mode):
            raise refusal  # The job itself is refused.
        rest = f"\nOr compare what works: --modes {','.join(configs)}" if configs else ""
        raise ConfigError(f"Mode {mode}: {refusal.law}", f"{refusal.way_out}{rest}")
    return configs


def _job(settings: list[str], hosts: Sequence[str]) -> Config:
    config = parse(with_settings({}, settings))
    if config.run.steps <= WARM_UP:
        raise ConfigError(
            f"compare needs more than {WARM_UP} step, whose time does not count, but run.steps is "
            f"{config.run.steps}.",
            "Leave run.steps to --steps.",
        )
    config = checked(config)
    divisor(axes(config, len(hosts), servers_of(config)), hosts, config.replication.shard)
    return config


def check_resolved(transport: Transport, configs: Mapping[str, Config]) -> None:
    """Raise ConfigError for a mode that does not fit these ranks; collective.

    Schedules and devices are checked. A job with a file for its sums is built, which simulates the
    file for each of its arrays. Then no mode is refused after another has been measured.
    """
    for mode, config in configs.items():
        try:
            agreed = agree_on(transport, partial(checked, config))
            on_all_ranks(transport, partial(resolve_here, agreed, transport.hosts))
            if any(is_file(config.flat()[key]) for key in ALGORITHMS):
                build(transport, config).close()
        except ConfigError as error:
            if not error.agreed:
                raise
            raise on_every_rank(ConfigError(f"Mode {mode}: {error.law}", error.way_out)) from None
