"""`mpitrain train --help-config`: every configuration key, those for a first run before the others."""

import json
import shutil
from itertools import groupby
from textwrap import fill

import click

from mpitrain.run.choices import keys


def print_keys(section: str) -> None:
    """Print the keys of a section, or of "all", with default, type, range and help."""
    sections = list(dict.fromkeys(key.name.partition(".")[0] for key in keys()))
    if section not in ("all", *sections):
        raise click.BadParameter(
            f"{section!r} is no section; there are {', '.join(sections)}.",
            param_hint="--help-config",
        )
    width = min(130, shutil.get_terminal_size((100, 24)).columns)
    click.echo(
        fill(
            "Every path in a configuration file counts from the folder of that file; behind --set, from the current "
            "directory.",
            width,
        )
    )
    listed = [key for key in keys() if section in ("all", key.name.partition(".")[0])]
    for is_basic in (True, False):
        if not is_basic and not all(key.is_basic for key in listed):
            click.echo("\nadvanced")
        rows = (key for key in listed if key.is_basic is is_basic)
        for name, group in groupby(rows, lambda key: key.name.partition(".")[0]):
            click.echo(f"\n[{name}]")
            for key in group:
                law = f"{key.type}, {key.range}" if key.range else key.type
                head = f"  {f'{key.name} = {json.dumps(key.default)}':<40} {law}"
                for text, first, rest in ((head, "", " " * 43), (key.help, " " * 6, " " * 6)):
                    click.echo(
                        fill(
                            text,
                            width,
                            initial_indent=first,
                            subsequent_indent=rest,
                            break_on_hyphens=False,
                        )
                    )
