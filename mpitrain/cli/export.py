"""`mpitrain export`: writes a checkpoint as a folder that programs of other projects load."""

import re
from pathlib import Path

import click

from mpitrain.cli import RootCommand
from mpitrain.cli.job_options import BASE, BEST, PLUGINS, RUN, changes, path_option
from mpitrain.errors import visible

UNITS = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def _nbytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,8})(KB|MB|GB)", value, re.ASCII)
    if not match:
        raise click.BadParameter(
            f"{value!r} is not a size such as 5GB or 500MB.", context, parameter
        )
    return int(match[1]) * UNITS[match[2]]


@click.command(cls=RootCommand)
@RUN
@click.option(
    "--to",
    "kind",
    metavar="FORMAT",
    help="Format of the folder: gpt2, llama, phi3, bert or peft (default: the kind of the run; peft for adapters).",
)
@path_option("--out", "The new folder (default: RUN_DIR/FORMAT).", metavar="DIR")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Dtype of the parameters.",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    metavar="SIZE",
    default="5GB",
    show_default=True,
    callback=_nbytes,
    help="Largest size of a file of parameters, in KB, MB or GB.",
)
@click.option("--merge", is_flag=True, help="Add the adapters of a LoRA run to its model.")
@BEST
@BASE
@PLUGINS
def command(
    run: Path,
    kind: str | None,
    out: Path | None,
    dtype: str,
    shard_bytes: int,
    merge: bool,
    best: bool,
    base: str | None,
    plugins: list[str] | None,
) -> None:
    """Write the newest checkpoint of RUN_DIR as a folder that other programs load.

    gpt2, llama, phi3, bert: a folder for transformers. peft: the adapters of a LoRA run, for peft.
    One process exports a checkpoint of any layout, and no MPI is started.
    """
    from mpitrain.run.export import export

    settings = changes((), plugins=plugins)
    exported = export(run, kind or "", out, dtype, shard_bytes, settings, merge, base or "", best)
    folder = visible(str(exported.folder))
    click.echo(
        f"{visible(str(run))} at step {exported.step} in {folder}: {', '.join(exported.files)}"
    )
    if not exported.tokenizer:
        click.echo("note: the run knows no tokenizer, so the folder has none.", err=True)
