"""The command line. Each command lives in a file of its own, loaded only when it is called or described."""

import importlib
import os
import sys

import click

from mpitrain import __version__
from mpitrain.cli.ending import leave_usage
from mpitrain.cli.output import open_output
from mpitrain.device import launched
from mpitrain.errors import MpitrainError, brief

STOPPED = 85  # exit code of a run that stopped on request after a checkpoint: run it again to go on
REPORT = "MPITRAIN_REPORT"  # set by `launch`: a file in which rank 0 of `train` leaves the path of its metrics.jsonl
TERMINAL = "MPITRAIN_TERMINAL"  # set to 1 by `launch` when a terminal is behind the pipe that the ranks are given

COMMANDS = ("train", "launch", "eval", "generate", "doctor", "bench")


class LazyGroup(click.Group):
    """Finds the command `name` in mpitrain.cli.<name> as the object `command`."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"mpitrain.cli.{name}").command if name in COMMANDS else None


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command, and let all ranks leave together if its usage is wrong."""
    open_output()
    if launched().rank > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives): rank 0 speaks for all
    try:
        sys.exit(commands.main(arguments, prog_name="mpitrain", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.message = brief(error.message)
        leave_usage(error.show, error.exit_code)
    except (MpitrainError, BrokenPipeError) as error:    # of standard output: whatever else is raised, a command knows
        if isinstance(error, MpitrainError):
            print(error, file=sys.stderr)
        sys.exit(1)
    except click.Abort:
        sys.exit(130)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpitrain")
def commands() -> None:
    """Train neural networks with nothing but message passing.

    \b
    One rank:    mpitrain train
    Four ranks:  mpitrain launch -n 4 -- train
    """
