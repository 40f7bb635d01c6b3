"""What `mpitrain plan` prints."""

from click.testing import CliRunner

from mpitrain.cli import commands


def shown(*words, columns=100):
    done = CliRunner().invoke(
        commands, ["plan", *map(str, words)], env={"COLUMNS": str(columns)}, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return done.output
