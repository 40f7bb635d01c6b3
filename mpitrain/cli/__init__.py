"""The command line: Click groups that import the module of a command only when it is called."""

import importlib
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import click

from mpitrain import __version__
from mpitrain.cli.session import leave_usage
from mpitrain.cli.terminal.output import open_output, silence
from mpitrain.errors import ConfigError, MpitrainError, brief, say
from mpitrain.hints import foreign, hint, similar
from mpitrain.machine.process import launched, leave_job_of_parent

USAGE = 2
"""Exit code of wrong usage or configuration."""
STOPPED = 85
"""Exit code of a run that stopped on request; `--resume` continues it."""
NOT_BEGUN = "stopped before the run began: there is nothing to save"
"""The message of a run that was stopped before it had a run directory."""


class Listed(NamedTuple):
    """A command as `--help` lists it, without importing it: to import all takes as long as to import Click.

    home      module below mpitrain.cli; if the Click command in it is not called `command`, a colon
              and its name follow; "" for a group
    sentence  the first sentence of its help
    """

    home: str
    sentence: str


COMMANDS = {
    "train": Listed("train", "Train a network on all ranks of the MPI job."),
    "launch": Listed(
        "launch.command",
        "Run an mpitrain COMMAND or a Python file on N ranks: mpitrain launch -n 4 -- train",
    ),
    "slurm": Listed(
        "slurm.command",
        "Write a batch script: mpitrain slurm --nodes 2 -- train book.toml > book.sbatch",
    ),
    "eval": Listed(
        "eval", "Evaluate the newest checkpoint of RUN_DIR on the held-out rows of its data source."
    ),
    "predict": Listed(
        "predict", "Write what a run predicts for held-out rows, or for other arrays."
    ),
    "generate": Listed("generate", "Generate text with the newest checkpoint of RUN_DIR."),
    "chat": Listed("chat", "Talk with a model that was trained on conversations, in the terminal."),
    "export": Listed(
        "export", "Write the newest checkpoint of RUN_DIR as a folder that other programs load."
    ),
    "data": Listed(
        "data", "Make files of tokens from text, train tokenizers, and show files of tokens."
    ),
    "bench": Listed(
        "bench.collectives",
        "Measure collectives on all ranks of the MPI job: mpitrain launch -n 4 -- bench all-reduce",
    ),
    "compare": Listed(
        "compare",
        "Measure one job with several settings, and other programs, in turns: launch -n 2 -- compare ring zero3+tp2",
    ),
    "plan": Listed(
        "plan.command",
        "Simulate pipelines and collectives, count memory, and measure which batch suits a job.",
    ),
    "doctor": Listed(
        "doctor",
        "Print Python, MPI, GPUs, BLAS, ranks and hosts, and warn of problems and their remedies.",
    ),
    "certify": Listed(
        "certify", "Measure every node, and print PASS or FAIL for each with the reason."
    ),
    "runs": Listed("", "Look at runs: report, plot, metrics, checkpoints, diff."),
    "learn": Listed("", "Learn how training is distributed: explain, claims, exercise, check."),
}
RUNS = {
    "report": Listed(
        "report", "Print where the time of runs went, from the traces of their ranks."
    ),
    "plot": Listed("runs:plot", "Draw the training and validation losses of runs."),
    "metrics": Listed(
        "runs:metrics",
        "Print losses, learning rate, speed and evaluations of runs, a line for each logged step.",
    ),
    "checkpoints": Listed("runs:checkpoints", "List the checkpoints of a run, and verify them."),
    "diff": Listed(
        "runs:diff", "Find the first step at which two runs differ, and exit with 1 if they do."
    ),
}
LEARN = {
    "explain": Listed(
        "textbook:explain",
        "Show how a method works: its real code runs on threads, with symbols as data.",
    ),
    "claims": Listed(
        "textbook:claims",
        "Measure sentences of textbooks, and print in which settings they are true.",
    ),
    "exercise": Listed(
        "textbook:exercise",
        "Write the skeleton of an exercise: a statement, and a function to complete.",
    ),
    "check": Listed(
        "textbook:check", "Check the solution of an exercise, or all Python files of a folder."
    ),
}
WORDS = {**COMMANDS, **RUNS, **LEARN}
"""Every word that may follow `mpitrain`. Those of the groups stood at the top once, and still work
there."""


class CommandGroup(click.Group):
    """A Click group whose help lists the whole first sentence of each command, in their order."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for name, command in self.commands.items() if not command.hidden]

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(context, name) is None:
            ending = hint(name, self.list_commands(context), is_command=True)
            raise click.UsageError(f"No such command {name!r}{ending}", context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.sentences(context))

    def sentences(self, context: click.Context) -> list[tuple[str, str]]:
        return [
            (name, command.get_short_help_str(1000))
            for name in self.list_commands(context)
            if (command := self.get_command(context, name))
        ]


class RootCommand(click.Command):
    """A Click command that rank 0 runs alone; other ranks exit."""

    def invoke(self, context: click.Context) -> Any:
        return super().invoke(context) if launched().rank == 0 else None


@cache
def _loaded(home: str) -> click.Command:
    module, _, name = home.partition(":")
    command: click.Command = getattr(
        importlib.import_module(f"mpitrain.cli.{module}"), name or "command"
    )
    return command


LINE = "mpitrain.line"
"""Key of the context: the words behind `mpitrain`."""


def explained(error: click.NoSuchOption, words: list[str]) -> click.UsageError:
    """Return the error for an unknown option: what it is here, or which option or key is meant.

    words  the command line, which has the value of the option
    """
    context, option = error.ctx, error.option_name
    assert context is not None
    params = [each for each in context.command.params if isinstance(each, click.Option)]
    meant = {name: [name] for each in params if not each.hidden for name in each.opts}
    value = _value_of(option, words)
    keys = []
    if "settings" in {each.name for each in params}:
        from mpitrain.config import keys as all_keys

        keys = [key.name for key in all_keys()]
    for key in keys:
        for spelling in {key, key.replace(".", "-"), key.partition(".")[2]}:
            name = f"--{spelling.replace('_', '-')}"
            if [name] != meant.get(name):
                meant.setdefault(name, []).append(f"--set {key}={value}")
    ending, spelt = ".", option.replace("_", "-")
    if spelt in meant:
        ending = f"; did you mean {' or '.join(meant[spelt])}?"
    elif row := foreign(option, is_command=not keys):
        key, _, its_value = row.ours.partition("`")[2].partition("`")[0].partition("=")
        if key in keys and row.ours.startswith("`"):
            rest = row.ours.partition("`")[2].partition("`")[2]
            row = row._replace(ours=f"`--set {key}={its_value or value}`{rest}")
        ending = f". {row}"
    elif close := similar(spelt, meant):
        ending = f"; did you mean {' or '.join(meant[close[0]])}?"
    elif passed := [each for each in params if "--with" in each.opts]:
        ending = f". --with: {passed[0].help}"
    return click.UsageError(f"No such option: {option}{ending}", context)


def _value_of(option: str, words: list[str]) -> str:
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.partition("=")[0] == option:
            return word.partition("=")[2] or ("VALUE" if following[:2] == "--" else following)
    return "VALUE"


class LazyGroup(CommandGroup):
    """A group that imports a command on first use.

    listed  {name: command} that `--help` lists
    hidden  {name: command} that `--help` leaves out
    """

    def __init__(
        self,
        *arguments: Any,
        listed: Mapping[str, Listed] = COMMANDS,
        hidden: Mapping[str, Listed] = WORDS,
        **more: Any,
    ):
        super().__init__(*arguments, **more)
        self.listed, self.words = listed, {**hidden, **listed}

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.listed)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in GROUPS:
            return GROUPS[name]
        return _loaded(self.words[name].home) if name in self.words else None

    def make_context(
        self, info_name: str | None, args: list[str], *rest: Any, **more: Any
    ) -> click.Context:
        words = list(args)
        context = super().make_context(info_name, args, *rest, **more)
        context.meta.setdefault(LINE, words)
        return context

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.NoSuchOption as error:
            raise explained(error, context.meta[LINE]) from None

    def sentences(self, context: click.Context) -> list[tuple[str, str]]:
        return [(name, listed.sentence) for name, listed in self.listed.items()]


GROUPS = {
    name: LazyGroup(name, help=COMMANDS[name].sentence, listed=listed, hidden={})
    for name, listed in (("runs", RUNS), ("learn", LEARN))
}


def main(arguments: list[str] | None = None) -> None:
    """The entry point: run a command. If its usage is wrong, all ranks exit together."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # Open MPI starts no rank without
    open_output()
    leave_job_of_parent()
    if launched().rank > 0:
        silence()
    try:
        sys.exit(commands.main(arguments, prog_name="mpitrain", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.message = brief(error.message)  # type: ignore[misc]  # final, but `show` of every subclass reads it
        leave_usage(error.show, error.exit_code)
    except MpitrainError as error:
        # Only rank 0 runs such a command, so no other rank would reach a barrier: exit alone.
        say(error.named())
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        # The system refuses a path that the user named.
        refusal = ConfigError(
            f"{error.filename or 'A file'} cannot be used: {error.strerror or error}.",
            "Name another path, or look at what is there.",
        )
        say(refusal.named())
        sys.exit(USAGE)
    except click.Abort:
        sys.exit(130)


def _print_version(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if not is_asked:
        return
    click.echo(f"mpitrain, version {__version__}")
    if context.params["verbose"]:
        click.echo("\n".join(_loaded("doctor:versions")()))
    context.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-v", "--verbose", is_flag=True, is_eager=True, help="With --version: of all that it runs on."
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
def commands(verbose: bool) -> None:
    """Train neural networks with nothing but message passing.

    \b
    One rank:    mpitrain train
    Four ranks:  mpitrain launch -n 4 -- train
    """
