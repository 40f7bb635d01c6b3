"""The command line. Each command lives in a file of its own, loaded only when it is called or described."""

import importlib

import click

from mpitrain import __version__

COMMANDS = ("train", "launch", "eval", "generate", "doctor")


class LazyGroup(click.Group):
    """Finds the command `name` in mpitrain.cli.<name> as the object `command`."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return importlib.import_module(f"mpitrain.cli.{name}").command if name in COMMANDS else None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mpitrain")
def main() -> None:
    """Train neural networks with nothing but message passing.

    \b
    One rank:    mpitrain train
    Four ranks:  mpitrain launch -n 4 -- train
    """
