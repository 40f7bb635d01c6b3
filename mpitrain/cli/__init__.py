"""The command line: a Click group that imports the module of a command only when it is called."""

import importlib
import os
import sys
from functools import cache

import click

from mpitrain import __version__
from mpitrain.cli.session import leave_usage
from mpitrain.cli.terminal.output import open_output
from mpitrain.errors import ConfigError, MpitrainError, brief
from mpitrain.machine.process import launched

USAGE = 2
"""Exit code of wrong usage or configuration."""
STOPPED = 85
"""Exit code of a run that stopped on request; `--resume` continues it."""
NOT_BEGUN = "stopped before the run began: there is nothing to save"
"""The message of a run that was stopped before it had a run directory."""

COMMANDS = {
    "train": "Train a network on all ranks of the MPI job.",
    "launch": "Run an mpitrain COMMAND or a Python file on N ranks: mpitrain launch -n 4 -- train",
    "slurm": "Write a batch script: mpitrain slurm --nodes 2 -- train book.toml > book.sbatch",
    "eval": "Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source.",
    "generate": "Generate text with the newest checkpoint of RUN_DIR.",
    "export": "Write the newest checkpoint of RUN_DIR as a folder that other programs load.",
    "data": "Make files of tokens from text, train tokenizers, and show files of tokens.",
    "doctor": "Print Python, MPI, GPUs, BLAS, ranks and hosts, and warn of problems and their remedies.",
    "certify": "Measure every node, and print PASS or FAIL for each with the reason.",
    "bench": "Measure collectives on all ranks of the MPI job: mpitrain launch -n 4 -- bench allreduce",
    "compare": "Train one job in several modes, in turns, on all ranks of the MPI job.",
    "plan": "Simulate pipelines and collectives, count memory, and measure which batch and techniques suit a job.",
    "explain": "Show how a method works: its real code runs on threads, with symbols as data.",
    "claims": "Measure sentences of textbooks, and print in which settings they are true.",
    "exercise": "Write the skeleton of an exercise: a statement, and a function to complete.",
    "check": "Check the solution of an exercise, or all Python files of a folder.",
    "metrics": "Print losses, learning rate, speed and evaluations of runs, a line for each logged step.",
    "diff": "Find the first step at which two runs differ, and exit with 1 if they do.",
    "plot": "Draw the training and validation losses of runs.",
    "report": "Print where the time of runs went, from the traces of their ranks.",
}
"""The first sentence of each command's help, for `mpitrain --help`.

`mpitrain --help` imports no command: importing all of them takes as long as importing Click.
"""


@cache
def _loaded(name: str) -> click.Command:
    command: click.Command = importlib.import_module(
        f"mpitrain.cli.{HOMES.get(name, name)}"
    ).command
    return command


HOMES = {
    "data": "data.command",
    "launch": "launch.command",
    "slurm": "slurm.command",
    "certify": "certify.command",
    "bench": "bench.collectives",
    "plan": "plan.command",
    "explain": "textbook.explain",
    "claims": "textbook.claims",
    "exercise": "textbook.exercise",
    "check": "textbook.check",
    "metrics": "runs.metrics",
    "diff": "runs.diff",
    "plot": "runs.plot",
}
"""Modules below mpitrain.cli of commands that are in packages.

Any other command is a module of the same name.
"""


class CommandGroup(click.Group):
    """A Click group whose help lists the whole first sentence of each command."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences(context))

    def sentences(self, context: click.Context) -> list[tuple[str, str]]:
        return [
            (name, command.get_short_help_str(1000))
            for name in self.list_commands(context)
            if (command := self.get_command(context, name))
        ]


def similar(name: str) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, COMMANDS, 1, 0.5)), None)


class LazyGroup(CommandGroup):
    """A group that imports a command on first use: the object `command` of its module."""

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
    """Run a command (the entry point). If its usage is wrong, all ranks exit together."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # Open MPI starts no rank without
    open_output()
    if launched().rank > 0:
        # Only rank 0 prints. The file stays open until the process ends.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        sys.exit(commands.main(arguments, prog_name="mpitrain", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.message = brief(error.message)  # type: ignore[misc]  # final, but `show` of every subclass reads it
        leave_usage(error.show, error.exit_code)
    except MpitrainError as error:
        # Only rank 0 runs such a command, so no other rank would reach a barrier: exit alone.
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # The system refuses a path that the user named.
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
