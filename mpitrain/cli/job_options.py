"""Options of several commands that describe the training job: the configuration file and keys."""

from pathlib import Path
from typing import Any

import click

from mpitrain.machine.process import KINDS

KEYS = {
    "data": "data.source",
    "rows": "run.eval_rows",
    "dp": "layout.dp",
    "tp": "layout.tp",
    "pp": "layout.pp",
    "device": "device.kind",
    "gemm": "device.gemm",
    "algorithm": "replication.algorithm",
    "out": "run.out",
    "plugins": "run.plugins",
    "base": "run.init_from",
}
"""The configuration key that each option sets."""

CONFIG_FILE = click.argument(
    "config_file", metavar="[CONFIG.toml]", required=False, type=click.Path(path_type=Path)
)
SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Set one configuration key (repeatable).",
)
PRESET = click.option(
    "--preset",
    metavar="NAME",
    help="Start from the keys of tiny, gpt2-124m or gpt2-350m; files and settings override them.",
)
DP = click.option(
    "--dp", type=int, metavar="N", help="Data-parallel replicas (default: all ranks)."
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
    help="Matrix products on a GPU: tiled (our kernels) or library (cuBLAS).",
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
PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    callback=lambda context, option, files: list(files) or None,
    help="A plugin that the run was trained with (repeatable): its run.plugins.",
)


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
    from mpitrain.config import merged, preset, read_toml, with_settings
    from mpitrain.run.choices import parse

    tables = merged(preset(preset_name), read_toml(config_file) if config_file else {})
    return parse(with_settings(tables, settings), config_file)
