"""The command line. Each command lives in a file of its own, loaded only when it is called."""

import importlib
import os
import sys
from functools import cache

import click

from mpitrain import __version__
from mpitrain.cli.numbers import with_plain_numbers
from mpitrain.cli.session import leave_usage
from mpitrain.cli.terminal.output import open_output
from mpitrain.errors import ConfigError, MpitrainError, brief
from mpitrain.machine.process import launched

USAGE = 2  # exit code of wrong usage or configuration
STOPPED = 85  # exit code of a run that stopped on request: run it again to go on
LAUNCHED = "MPITRAIN_LAUNCHED"  # set by `launch`, which stops a run without ending its launcher
# What rank 0 of `train` says on its standard output, and `launch` hears: the run has its directory, ended, or was stopped.
BEGAN, ENDED, STOPPED_AT = "; run directory ", "done: parameters bitwise equal", "stopped at step "
NOT_BEGUN = "stopped before the run began: there is nothing to save"

COMMANDS = {
    "train": "Train a network, on all the ranks this was started with.",
    "launch": "Run an mpitrain COMMAND or a Python file on N ranks: mpitrain launch -n 4 -- train",
    "eval": "Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source.",
    "generate": "Write text with the newest checkpoint of RUN_DIR.",
    "doctor": "Say what is here: Python, MPI, GPUs, BLAS, ranks and hosts; what works, what will go wrong, and the way out.",
    "bench": "Measure collectives, with all the ranks this was started with: mpitrain launch -n 4 -- bench allreduce",
    "compare": "Train one job under several modes of replication, one after the other, on all the ranks this was started with.",
    "plan": "Print what would happen: the order of a pipeline, the steps of an all-reduce.",
    "plot": "Draw the training and validation losses of runs.",
    "report": "Say where the time of runs went, by what their ranks noted last; of a run that died, what each rank did.",
}
"""The first sentence of each command's own help, for `mpitrain --help`, which loads no command: ten take as long as Click."""


@cache
def _loaded(name: str) -> click.Command:
    return with_plain_numbers(
        importlib.import_module(f"mpitrain.cli.{HOMES.get(name, name)}").command
    )


HOMES = {"launch": "launch.command", "bench": "bench.collectives", "plan": "plan.command"}
"""Modules below mpitrain.cli of the commands that are packages; any other command is a module of its name."""


class Group(click.Group):
    """Lists each command with its whole first sentence, on as many lines as it takes."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences(context))

    def sentences(self, context: click.Context) -> list[tuple[str, str]]:
        return [
            (name, found.get_short_help_str(1000))
            for name in self.list_commands(context)
            if (found := self.get_command(context, name))
        ]


def similar(name: str) -> str | None:
    """The command that is spelt most like this."""
    import difflib

    return next(iter(difflib.get_close_matches(name, COMMANDS, 1, 0.5)), None)


class LazyGroup(Group):
    """Finds the command `name` as the object `command` of its module in mpitrain.cli."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return _loaded(name) if name in COMMANDS else None

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(context, args)
        close = similar(name)
        raise click.UsageError(
            f"No such command {name!r}" + (f"; did you mean {close!r}?" if close else "."), context
        )

    def sentences(self, context: click.Context) -> list[tuple[str, str]]:
        return list(COMMANDS.items())


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run a command, and let all ranks leave together if its usage is wrong."""
    open_output()
    if launched().rank > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives): rank 0 speaks for all
    try:
        sys.exit(commands.main(arguments, prog_name="mpitrain", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.message = brief(error.message)  # type: ignore[misc]  # final, but `show` of every subclass reads it
        leave_usage(error.show, error.exit_code)
    except (
        MpitrainError
    ) as error:  # of a command that is rank 0's alone: no other rank would meet it at a barrier
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a path of the user's that the system refuses
        print(
            ConfigError(
                f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.",
                "Name another path, or look at what is there.",
            ),
            file=sys.stderr,
            flush=True,
        )
        sys.exit(USAGE)
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
