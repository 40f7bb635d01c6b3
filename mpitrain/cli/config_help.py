"""`mpitrain train --help-config`: the keys of a first run, then the advanced ones, then those for experts."""

import json
import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from textwrap import TextWrapper, fill

import click
import tomli_w

from mpitrain.config import PATHS, Config, ConfigKey
from mpitrain.errors import ConfigError
from mpitrain.files import cannot_write, write_whole
from mpitrain.hints import foreign
from mpitrain.run.choices import keys

EXPERT = {
    "parameter servers": [
        f"replication.{name}" for name in ("servers", "update", "staleness", "async_lr")
    ],
    "averaging of workers": [
        f"replication.{name}" for name in ("period", "outer_lr", "outer_momentum")
    ],
    "ZeRO": [f"replication.{name}" for name in ("shard", "zero_keep", "gather")],
    "messages": [
        "layout.algorithm",
        *(f"replication.{name}" for name in ("tuning", "bucket_mb", "overlap", "progress_thread")),
        "device.cuda_aware",
    ],
    "safety": [
        *(f"run.{name}" for name in ("stall_seconds", "on_stall", "grace", "on_nonfinite")),
        *(f"run.{name}" for name in ("on_spike", "spike", "snapshot_every", "copies_every")),
        "memory.release_every",
    ],
    "tests": [f"run.{name}" for name in ("digest_every", "delay", "inject")],
}
"""The keys that only experts turn, by what they are about."""


def print_keys(word: str) -> None:
    """Print keys with default, type, range and help: of a section, of "all", or those with this word.

    A word is searched in the names; only if it is in none, in the help and in the words of other
    tools.
    """
    sections = list(dict.fromkeys(key.name.partition(".")[0] for key in keys()))
    shown = [key for key in keys() if word in ("all", key.name.partition(".")[0])]
    shown = shown or [key for key in keys() if word.replace("-", "_") in key.name]
    row = foreign(word)
    shown = shown or [key for key in keys() if row and key.name in row.ours]
    shown = shown or [key for key in keys() if word.lower() in key.help.lower()]
    if not shown:
        raise click.BadParameter(
            f"{word!r} is in no key and no help; sections are {', '.join(sections)}.",
            param_hint="--help-config",
        )
    width = min(130, shutil.get_terminal_size((100, 24)).columns)
    paths = "Every path in a configuration file counts from the folder of that file; behind --set,"
    click.echo(fill(f"{paths} from the current directory.", width))
    listed = {key.name: key for key in shown}
    expert = {name for names in EXPERT.values() for name in names}
    usual = [key for key in listed.values() if key.name not in expert]
    for title, is_basic in (("", True), ("advanced", False)):
        rows = [key for key in usual if key.is_basic is is_basic]
        if title and rows:
            click.echo(f"\n{title}")
        for name, group in groupby(rows, lambda key: key.name.partition(".")[0]):
            _print_group(name, group, width)
    if expert & listed.keys():
        click.echo("\nfor experts")
    for title, names in EXPERT.items():
        if rows := [listed[name] for name in names if name in listed]:
            _print_group(title, rows, width)


def write_keys(path: Path, config: Config) -> None:
    """Write the keys of a first run with comments, and those with another value than the default.

    raises  ConfigError if the file exists
    """
    if path.exists():
        raise ConfigError(
            f"--write-config writes a new file, but {path} exists.", "Name another file."
        )
    values = config.flat()
    lines, tables = ["# mpitrain train --help-config explains all keys."], list[str]()
    chosen = [key for key in keys() if key.is_basic or values[key.name] != key.default]
    moved = [
        key.name
        for key in chosen
        if (*key.name.split("."),) in PATHS and {*str(values[key.name])} & {*":/."}
    ]
    if moved and path.resolve().parent != Path.cwd():
        raise ConfigError(
            f"Paths in a configuration file count from its folder, but {path} is not beside those of {', '.join(moved)}.",
            "Go to that folder first, or name a file of the current one.",
        )
    for section, group in groupby(chosen, lambda key: key.name.partition(".")[0]):
        lines += ["", f"[{section}]"]
        for key in group:
            law = f"{key.help}; {key.range}" if key.range not in key.help else key.help
            comment = TextWrapper(100, "# ", "# ", break_on_hyphens=False).wrap(law)
            own = {key.name.partition(".")[2]: values[key.name]}
            text = tomli_w.dumps(own).strip()
            if text.startswith("["):  # TOML has a table behind the other keys of its section.
                tables += ["", *comment, tomli_w.dumps({section: own}).strip()]
            else:
                lines += [*comment, text]
    try:
        write_whole(path, "\n".join([*lines, *tables, ""]))
    except OSError as error:
        raise cannot_write(path, error) from None
    click.echo(f"written to {path}: mpitrain train {path}")


def _print_group(title: str, keys: Iterable[ConfigKey], width: int) -> None:
    click.echo(f"\n[{title}]")
    for key in keys:
        law = f"{key.type}, {key.range}" if key.range else key.type
        head = f"  {f'{key.name} = {json.dumps(key.default)}':<40} {law}"
        for text, first, rest in ((head, "", " " * 43), (key.help, " " * 6, " " * 6)):
            wrap = TextWrapper(width, first, rest, break_on_hyphens=False)
            click.echo(wrap.fill(text))
