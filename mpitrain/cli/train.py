"""`mpitrain train`: build what the configuration says and train it."""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import STOPPED
from mpitrain.cli.ending import ranks, settings_of
from mpitrain.cli.output import be_courtesy

SAMPLE = 400  # bytes of text printed after training


class ResumeCommand(click.Command):
    """Lets `--resume` stand alone before another argument: only `--resume=auto` carries a value."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, ["--resume=yes" if a == "--resume" else a for a in args])


@click.command(cls=ResumeCommand)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one configuration key (repeatable).")
@click.option("--out", metavar="DIR", help="Run directory (default runs/<date>-<n>).")
@click.option("--resume", type=click.Choice(["yes", "auto"]), default=None, metavar="[=auto]",
              help="Go on with the run in --out from its newest checkpoint; =auto starts it if there is none.")
@click.option("--dp", type=int, metavar="N", help="Data-parallel replicas (default: all ranks).")
@click.option("--device", metavar="KIND", help="Where to compute: auto, cpu, cuda, cuda-sim.")
@click.option("--gemm", metavar="WHO", help="Matrix products on a GPU: tiled (our kernels) or library (cuBLAS).")
@click.option("--help-config", is_flag=True, help="Print every configuration key and exit.")
def command(config_file: Path | None, settings: tuple[str, ...], out: str | None, resume: str | None, dp: int | None,
            device: str | None, gemm: str | None, help_config: bool) -> None:
    """Train a network, on all the ranks this was started with.

    Without arguments: a small GPT on the text of Python's own documentation.
    """
    if help_config:
        print_keys()
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
    from mpitrain.session import train
    from mpitrain.transport.agree import agreed, check_same

    config = agreed(transport, configured)
    check_same(transport, "configuration", config.flat())
    finished = train(transport, config, resume, stop_requested, Progress() if transport.rank == 0 else Silent())
    if transport.rank == 0 and not finished.stopped and finished.job.source.model == "gpt":
        _print_sample(finished)
    return finished


def _configured(config_file: Path | None, settings: list[str], resume: str) -> Any:
    """The configuration file, or else that of the run that is resumed, under the settings of the command line."""
    from mpitrain.config import parse, read_toml, with_settings
    from mpitrain.rundir import CONFIG

    if config_file:
        return parse(with_settings(read_toml(config_file), settings))
    out = with_settings({}, settings).get("run", {}).get("out")
    if resume == "no" or not isinstance(out, str) or not (Path(out) / CONFIG).exists():
        return parse(with_settings({}, settings))
    stored = {**read_toml(Path(out) / CONFIG), "layout": {}}  # a resumed run may have other ranks
    return parse(with_settings(stored, settings))


def _print_sample(finished: Any) -> None:
    """A little of what the model writes after a line break; raw bytes where the source is text, else token numbers."""
    from itertools import islice

    from mpitrain.errors import TrainingError
    from mpitrain.generate import tokens

    is_text = not finished.job.trainer.config.data.source.startswith("tokens:")
    drawn = tokens(finished.job.trainer, [ord("\n") if is_text else 0], temperature=0.8, top_k=40, seed=0)
    try:
        sample = list(islice(drawn, SAMPLE))
    except TrainingError as error:
        print(f"no sample of what it writes: {error.law}", flush=True)
        return
    text = bytes(sample) if is_text else " ".join(map(str, sample)).encode()
    sys.stdout.buffer.write(b"a sample of what it writes:\n" + text + b"\n")
    sys.stdout.buffer.flush()


def print_keys() -> None:
    """Every configuration key with type, default, range and help."""
    from mpitrain.config import keys

    section = ""
    for key in keys():
        if key.name.split(".")[0] != section:
            section = key.name.split(".")[0]
            click.echo(f"\n[{section}]")
        kind = key.type + (f" {key.range}" if key.range else "")
        click.echo(f"  {key.name:<24} {kind:<28} {key.default!r:<14} {key.help}")
