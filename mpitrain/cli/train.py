"""`mpitrain train`: build what the configuration says and train it."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from mpitrain.cli import NOT_BEGUN, STOPPED
from mpitrain.cli.ending import STALL_SECONDS, ranks, settings_of

SAMPLE = 400  # bytes of text printed after training
REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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
    options = settings_of(("layout.dp", dp), ("device.kind", device), ("device.gemm", gemm), ("run.out", out))
    overrides = [*settings, *options]
    configured = partial(_configured, config_file, overrides, resume or "no")
    stop = Stop()
    with ranks(kind=lambda: configured().device.kind, patience=lambda: configured().run.stall_seconds) as transport:
        finished = _train(transport, configured, resume or "no", stop)
    sys.exit(STOPPED if finished.stopped else 0)


class Stop:
    """What INT, TERM and USR1 do to this rank: they end the process until `note`, and ask for a stop from then on.

    Before the ranks are connected the kernel ends the process, for mpi4py starts MPI with the interpreter's lock held, and
    no Python runs meanwhile. After `connected` a thread does, which works while the main thread waits for a message.
    """

    def __init__(self) -> None:
        self.requested = False
        self._is_noted = False
        for number in REQUESTS:
            signal.signal(number, signal.SIG_DFL)

    def connected(self, rank: int) -> None:
        """The ranks have found each other; from now on a request that ends the process says so."""
        heard, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        threading.Thread(target=self._listen, args=(heard, rank), name="stop", daemon=True).start()
        for number in REQUESTS:
            signal.signal(number, self._note)

    def note(self) -> None:
        """The run is about to have something to save."""
        self._is_noted = True

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.requested and self._is_noted:  # schedulers repeat TERM, a person means it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True

    def _listen(self, heard: int, rank: int) -> None:
        while os.read(heard, 1):
            time.sleep(1 if rank > 0 else 0)  # the first to leave may end the one that prints
            if not self._is_noted:
                print(NOT_BEGUN, flush=True)
                os._exit(STOPPED)


def _train(transport: Any, configured: Callable[[], Any], resume: str, stop: Stop) -> Any:
    from mpitrain.cli.progress import Progress, Silent
    from mpitrain.metrics import Watchdog
    from mpitrain.session import train
    from mpitrain.transport.agree import agreed, check_same

    stop.connected(transport.rank)
    watchdog = Watchdog(transport.rank, STALL_SECONDS)
    config = agreed(transport, configured)
    watchdog.patience(config.run.stall_seconds)
    check_same(transport, "configuration", config.flat())
    watcher = Progress() if transport.rank == 0 else Silent()
    finished = train(transport, config, resume, lambda: stop.requested, watcher, stop.note, watchdog)
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
