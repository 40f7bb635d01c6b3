"""`mpitrain bench`: the group of measuring commands."""

import click

from mpitrain.cli.bench_train import command as train


@click.group()
def command() -> None:
    """Measure what this machine does."""


command.add_command(train)
