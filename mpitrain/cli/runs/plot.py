"""`mpitrain runs plot`: draws the loss curves of runs into one picture."""

from pathlib import Path

import click

from mpitrain.machine import process


@click.command()
@click.argument(
    "runs",
    metavar="RUN_DIR [RUN_DIR ...]",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("curves.png"),
    show_default=True,
    help="Picture to write.",
)
@click.option(
    "--over",
    type=click.Choice(["steps", "tokens", "samples", "time"]),
    default="steps",
    show_default=True,
    help="Quantity on the x axis.",
)
@click.option("--log", "is_log", is_flag=True, help="Use a logarithmic loss axis.")
def command(runs: tuple[Path, ...], out: Path, over: str, is_log: bool) -> None:
    """Draw the training and validation losses of runs.

    Needs matplotlib: pip install 'mpitrain[report]'.
    """
    from mpitrain.files import cannot_write
    from mpitrain.plots import check_drawable
    from mpitrain.run.run_dir import metrics_of
    from mpitrain.tools.bench.plot_loss import draw

    if process.launched().rank > 0:
        return  # only rank 0 draws
    check_drawable(out, "--out")
    metrics = {str(run): metrics_of(run) for run in runs}
    try:
        draw(metrics, over, is_log, out)
    except OSError as error:
        raise cannot_write(out, error) from None
    click.echo(f"{len(runs)} run(s) drawn in {out}")
