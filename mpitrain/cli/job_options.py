"""Options of several commands that describe the training job: the configuration file and keys."""

import errno
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mpitrain.cli.session import MOST
from mpitrain.errors import ConfigError
from mpitrain.files import cannot_write
from mpitrain.machine.process import KINDS
from mpitrain.tools.words import LANGUAGES, language_of, said, to_fit

KEYS = {
    "data": "data.source",
    "steps": "run.steps",
    "epochs": "run.epochs",
    "lr": "optimizer.lr",
    "rows": "run.eval_rows",
    "dp": "layout.dp",
    "cp": "layout.cp",
    "ep": "layout.ep",
    "tp": "layout.tp",
    "pp": "layout.pp",
    "device": "device.kind",
    "gemm": "device.gemm",
    "algorithm": "replication.algorithm",
    "out": "run.out",
    "plugins": "run.plugins",
    "base": "run.init_from",
    "context": "model.context",
}
"""The configuration key that each option sets."""


class Finite(click.FloatRange):
    """A Click type: a float in a range, and neither infinity nor NaN, which every range lets through."""

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> float:
        number = float(super().convert(value, parameter, context))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", parameter, context)
        return number


Option = Callable[[Callable], Callable]


def with_options(*options: Option) -> Option:
    """Return a decorator that adds these options to a command; --help lists them in this order."""

    def add(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def path_option(name: str, text: str, into: str | None = None, **more: Any) -> Option:
    """Return a Click option for a path; `into` as for `counted`, `more` as for Click's own."""
    names = (name, into) if into else (name,)
    return click.option(*names, type=click.Path(path_type=Path), help=text, **more)


def output_option(name: str, text: str) -> Option:
    """Return the option `--json`, `--csv` or `--plot`, which names an output file."""
    return path_option(name, text, f"{name[2:]}_file")


def counted(
    name: str,
    least: int,
    default: int,
    text: str,
    into: str | None = None,
    most: int | None = MOST,
    short: str = "",
) -> Option:
    """Return a Click option for an integer; `into` is the name of the parameter, if it differs."""
    return _numbered(name, click.IntRange(least, most), default, text, into, short)


def measured(
    name: str,
    least: float,
    default: float,
    text: str,
    into: str | None = None,
    most: float | None = None,
) -> Option:
    """Return a Click option for a float; arguments as for `counted`."""
    return _numbered(name, Finite(least, most), default, text, into)


def _numbered(
    name: str, kind: click.ParamType, default: float, text: str, into: str | None, short: str = ""
) -> Option:
    names = [each for each in (short, name, into) if each]
    return click.option(*names, type=kind, default=default, show_default=True, help=text)


CONFIG_FILE = click.argument(
    "config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path)
)
SETTINGS = "MPITRAIN_SET"
"""The variable with settings for batch scripts: run.seed=1 optimizer.lr=1e-3. Those of --set win."""


def _with_variable(
    context: click.Context, option: click.Parameter, settings: tuple[str, ...]
) -> tuple[str, ...]:
    try:
        return (*shlex.split(os.environ.get(SETTINGS, "")), *settings)
    except ValueError as error:
        raise click.BadParameter(f"{os.environ[SETTINGS]}: {error}", param_hint=SETTINGS) from None


SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    callback=_with_variable,
    help=f"Set one configuration key (repeatable). The variable {SETTINGS} has more, with spaces between.",
)
PRESET = click.option(
    "--preset",
    metavar="NAME",
    help="Start from the keys of tiny, gpt2-124m, gpt2-350m, llama-160m or llama-1b; files and settings override them.",
)
DATA = click.option("--data", metavar="SOURCE", help="Data to train on (default: pydocs).")
STEPS = click.option("--steps", type=int, metavar="N", help="Steps in all (default: 400).")
EPOCHS = click.option("--epochs", type=float, metavar="N", help="Passes over the data, not steps.")
LR = click.option("--lr", type=float, metavar="X", help="Peak learning rate.")
DP = click.option(
    "--dp", type=int, metavar="N", help="Data-parallel replicas (default: all ranks)."
)
CP = click.option("--cp", type=int, metavar="N", help="Context-parallel ranks (default: 1).")
EP = click.option(
    "--ep", type=int, metavar="N", help="Replicas that divide the experts (default: 1)."
)
TP = click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks (default: 1).")
PP = click.option("--pp", type=int, metavar="N", help="Pipeline stages (default: 1).")
DEVICE = click.option("--device", metavar="KIND", help=f"Kind of device: auto, {', '.join(KINDS)}.")
OWN_DEVICE = click.option(
    "--device", metavar="KIND", help="Kind of device (default: the run's own)."
)
GEMM = click.option(
    "--gemm",
    metavar="WHO",
    help="Matrix products on a GPU: tiled (our kernels), 3xtf32 (float32 on tensor cores), library (cuBLAS), auto (the faster).",
)
ALGORITHM = click.option(
    "--algorithm",
    metavar="NAME|FILE.py",
    help="All-reduce of the gradients, or a file with one of your own (default: auto).",
)
BASE = click.option(
    "--base",
    metavar="DIR",
    help="The model under the adapters of the run, if it has moved: its run.init_from.",
)
CONTEXT = click.option(
    "--context",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens that a folder of another project reads (default: its own, at most 4096).",
)
BEST = click.option(
    "--best", is_flag=True, help="The checkpoint with the best validation loss, not the newest."
)
PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    callback=lambda context, option, files: list(files) or None,
    help="A plugin that the run was trained with (repeatable): its run.plugins.",
)


RUN = click.argument("run", metavar="RUN_DIR", type=click.Path(path_type=Path))
run_options = with_options(RUN, BEST, TP, PP, OWN_DEVICE, BASE, CONTEXT, PLUGINS)
"""The directory of a trained run, or a folder of another project, and the options to open it."""


def changes(settings: tuple[str, ...], **options: Any) -> list[str]:
    """Return the settings and, for each option that is given, `section.key=value`."""
    values = {KEYS[name]: value for name, value in options.items() if value not in (None, ())}
    return [*settings, *(f"{key}={_toml(value)}" for key, value in values.items())]


def _toml(value: Any) -> str:
    import tomli_w

    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def configured(
    config_file: Path | None, settings: list[str], preset_name: str | None = None
) -> Any:
    """Return the configuration of the file over the preset or the defaults, with the settings."""
    from mpitrain.config import tables_of
    from mpitrain.run.choices import parse

    return parse(tables_of(config_file, settings, preset_name), config_file)


def check_files(rank: int, written: Sequence[Path | None], drawn: Path | None = None) -> None:
    """Raise ConfigError unless rank 0 can write these files, all different, and draw this picture."""
    if rank != 0 or not any((*written, drawn)):
        # Without files the imports below are skipped: `plan schedule` then loads no NumPy.
        return
    from mpitrain.files import check_writable
    from mpitrain.plots import check_drawable

    files: set[str] = set()
    for path in filter(None, (*written, drawn)):
        files, others = files | {os.path.realpath(path)}, files
        if files == others:
            raise ConfigError(
                f"Each output has a file of its own, but {path} is given twice.",
                "Name another file for one of them.",
            )
    for path in filter(None, written):
        check_writable(path)
    if drawn:
        check_drawable(drawn)


FOREIGN = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The numbers of errors of a folder that this user may only read."""


class Outputs:
    """The output files of a command. A failed write does not end it: `settle` raises the error.

    So a full disk costs one file, never the measurement.
    """

    def __init__(self) -> None:
        self._refusals: dict[Path, ConfigError] = {}
        self._notes: dict[Path, str] = {}

    @contextmanager
    def to(self, path: Path, extra: str = "") -> Iterator[None]:
        """Catch the errors of writing `path` for `settle`; a later successful write clears them.

        extra  what is written there beside the output of the command; where this user may not write,
               as in another's run, a note says that it is missing, and there is no error
        """
        try:
            yield
        except BrokenPipeError:
            # Standard output was closed: this is no error of the output file.
            raise
        except OSError as error:
            if extra and error.errno in FOREIGN:
                self._notes[path] = f"note: no {extra}: {path} cannot be written: {error.strerror}."
            elif path not in self._notes:  # The first error is the cause of the next ones.
                self._refusals.setdefault(path, cannot_write(path, error))
        else:
            self._refusals.pop(path, None)

    def settle(self) -> None:
        """Raise ConfigError if a file could not be written. Call it after all output is printed."""
        for note in self._notes.values():
            click.echo(note, err=True)
        for refusal in self._refusals.values():
            raise refusal


LANGUAGE = "mpitrain.language"
"""Key of the context of a command: the language of its output."""


def _chosen(context: click.Context, option: click.Parameter, value: str | None) -> str:
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG")
    context.meta[LANGUAGE] = value or language_of(locale or "")
    return str(context.meta[LANGUAGE])


def language_option(is_passed: bool) -> Option:
    """Return the option --language: passed to the command, or read by `say` and `spoken` alone."""
    return click.option(
        "--language",
        type=click.Choice(LANGUAGES),
        callback=_chosen,
        expose_value=is_passed,
        help="English or Korean. Default: the language of LANG.",
    )


def spoken() -> str:
    """Return the language of the command that runs: that of its --language, or else English."""
    context = click.get_current_context(silent=True)
    return str(context.meta.get(LANGUAGE, "en")) if context else "en"


def in_words(lines: Iterable[str], columns: int = 0) -> str:
    """Return lines of English as a text in the language of the command.

    columns  of the terminal, at which longer lines are wrapped; 0: they are not
    """
    language, shown = spoken(), list[str]()
    for line in (said(part, language) for each in lines for part in each.split("\n")):
        shown += to_fit(line, columns)
    return "\n".join(shown)


def say(lines: Iterable[str], columns: int = 0) -> None:
    """Print lines of English in the language of the command; `columns` as in `in_words`."""
    click.echo(in_words(lines, columns))
