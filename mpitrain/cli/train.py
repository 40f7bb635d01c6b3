"""`mpitrain train`: build what the configuration says and train it."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import STOPPED
from mpitrain.cli.ending import ranks, settings_of
from mpitrain.cli.output import be_courtesy

SAMPLE_SECONDS = 10  # of drawing the sample after training, which keeps all the ranks


class TrainCommand(click.Command):
    """Lets `--resume` stand alone, and knows that an option it lacks may be a configuration key."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        for i, word in enumerate(given):
            if word == "--resume":  # only `auto` is a value of it; whatever else follows is an argument of its own
                given[i] = "--resume=auto" if given[i + 1:i + 2] == ["auto"] and given.pop(i + 1) else "--resume=yes"
        try:
            return super().parse_args(context, list(given))
        except click.NoSuchOption as error:
            if meant := _meant(error.option_name, given):
                raise click.UsageError(f"No such option: {error.option_name}{meant}", context) from None
            raise


def _meant(option: str, args: list[str]) -> str:
    """How the configuration keys that an unknown option may mean are set, or why they cannot be set to this; else nothing."""
    from mpitrain.config import nearest, parse, with_settings
    from mpitrain.errors import ConfigError

    keys = nearest(option.lstrip("-"))
    place = next(i for i, word in enumerate(args) if word.partition("=")[0] == option)
    following = next((word for word in args[place + 1:place + 2] if not word.startswith("--")), "VALUE")
    value = args[place].partition("=")[2] or following
    if len(keys) == 1 and value != "VALUE":
        try:
            parse(with_settings({}, [f"{keys[0]}={value}"]))
        except ConfigError as refusal:
            return f", and {refusal.law}"
    return f"; did you mean {' or '.join(f'--set {key}={value}' for key in keys)}?" if keys else ""


@click.command(cls=TrainCommand)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one configuration key (repeatable).")
@click.option("--out", metavar="DIR", help="Run directory (default runs/<date>-<n>).")
@click.option("--resume", type=click.Choice(["yes", "auto"]), default=None, metavar="[=auto]",
              help="Go on with the run in --out from its newest checkpoint; =auto starts it if there is none.")
@click.option("--dp", type=int, metavar="N", help="Data-parallel replicas (default: all ranks).")
@click.option("--device", metavar="KIND", help="Where to compute: auto, cpu, cuda, cuda-sim.")
@click.option("--gemm", metavar="WHO", help="Matrix products on a GPU: tiled (our kernels) or library (cuBLAS).")
@click.option("--help-config", "described", is_flag=False, flag_value="all", metavar="[SECTION]",
              help="Print the configuration keys, all or of a section, and exit.")
def command(config_file: Path | None, settings: tuple[str, ...], out: str | None, resume: str | None, dp: int | None,
            device: str | None, gemm: str | None, described: str | None) -> None:
    """Train a network, on all the ranks this was started with.

    Without arguments: a small GPT on the text of Python's own documentation.
    """
    if described is not None:
        print_keys(described)
        return
    be_courtesy()
    options = settings_of(("layout.dp", dp), ("device.kind", device), ("device.gemm", gemm), ("run.out", out))
    overrides = [*settings, *options]
    configured = partial(_configured, config_file, overrides, resume or "no")
    requested: list[int] = []
    listen(requested)
    with ranks(kind=lambda: configured().device.kind) as transport:
        finished = _train(transport, configured, resume or "no", lambda: bool(requested))
    sys.exit(STOPPED if finished.stopped else 0)


def listen(requested: list[int]) -> None:
    """Note requests to stop, from the first moment on. A second Ctrl-C ends the process; schedulers repeat TERM."""
    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        requested.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)


def _train(transport: Any, configured: Callable[[], Any], resume: str, stop_requested: Callable[[], bool]) -> Any:
    from mpitrain.cli.progress import Progress, Silent
    from mpitrain.collectives.tuning import DEFAULT, foreign
    from mpitrain.session import train
    from mpitrain.transport.agree import agreed, check_same, on_root

    config = agreed(transport, configured)
    check_same(transport, "configuration", config.flat())
    is_guessed = config.replication.algorithm == "auto" and not config.replication.tuning
    if transport.rank == 0 and is_guessed and (advice := foreign(DEFAULT, transport.hosts)):
        print(f"{advice} in replication.tuning", flush=True)
    finished = train(transport, config, resume, stop_requested, Progress() if transport.rank == 0 else Silent())
    if finished.job.step < config.run.steps and config.run.sample and finished.job.source.model == "gpt" and not finished.stopped:
        on_root(transport, lambda: _print_sample(finished, stop_requested))
    return finished


def _configured(config_file: Path | None, settings: list[str], resume: str) -> Any:
    """The configuration file, or else that of the run that is resumed, under the settings of the command line."""
    from mpitrain.config import parse, read_toml, with_settings
    from mpitrain.rundir import CONFIG, configuration

    if config_file:
        return parse(with_settings(read_toml(config_file), settings))
    out = with_settings({}, settings).get("run", {}).get("out")
    if resume == "no" or not isinstance(out, str) or not (Path(out) / CONFIG).exists():
        return parse(with_settings({}, settings))
    stored = {**configuration(Path(out)).model_dump(), "layout": {}}  # a resumed run may have other ranks
    return parse(with_settings(stored, settings))


def _print_sample(finished: Any, stop_requested: Callable[[], bool]) -> None:
    """A little of what the model writes after a line break; token numbers where the source is no text."""
    from itertools import islice

    from mpitrain.cli.generate import readable
    from mpitrain.errors import TrainingError
    from mpitrain.generate import tokens

    config = finished.job.trainer.config
    is_text, until = not config.data.source.startswith("tokens:"), time.monotonic() + SAMPLE_SECONDS
    sample = []
    try:
        drawn = tokens(finished.job.trainer, [ord("\n") if is_text else 0], temperature=0.8, top_k=40, seed=0)
        for token in islice(drawn, config.run.sample):
            sample.append(token)
            if time.monotonic() > until or stop_requested():
                break
    except TrainingError as error:
        print(f"no sample of what it writes: {error.law}", flush=True)
        return
    text = b"".join(readable([bytes(sample)])) if is_text else " ".join(map(str, sample)).encode()
    sys.stdout.buffer.write(b"a sample of what it writes:\n" + text + b"\n")
    sys.stdout.buffer.flush()


def print_keys(section: str) -> None:
    """Every configuration key of a section, or of "all", with default, type, range and help."""
    import json
    from itertools import groupby
    from textwrap import fill

    from mpitrain.config import keys

    sections = {name: list(rows) for name, rows in groupby(keys(), lambda key: key.name.partition(".")[0])}
    if section != "all" and section not in sections:
        raise click.BadParameter(f"{section!r} is no section; there are {', '.join(sections)}.", param_hint="--help-config")
    width = min(130, shutil.get_terminal_size((100, 24)).columns)
    for name in sections if section == "all" else [section]:
        click.echo(f"\n[{name}]")
        for key in sections[name]:
            law = f"{key.type}, {key.range}" if key.range else key.type
            head = f"{key.name} = {json.dumps(key.default)}"
            click.echo(fill(f"  {head:<40} {law}", width, subsequent_indent=" " * 43, break_on_hyphens=False))
            click.echo(fill(key.help, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False))
