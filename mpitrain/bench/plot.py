"""Pictures of benchmark rows; needs matplotlib (the `report` extra)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from mpitrain.bench.sweep import Row
from mpitrain.bench.table import check_writable
from mpitrain.errors import ConfigError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#bcbd22", "#17becf")
"""Told apart by colour-blind readers as far as so many can be."""


def check_drawable(path: Path, option: str = "--plot") -> None:
    """ConfigError unless a picture can be drawn there: without matplotlib, or in a format it does not know."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(f"{option} needs matplotlib, which is not installed.", "pip install 'mpitrain[report]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"{option} draws files that end in {', '.join(sorted(known))}, but this is {path}.",
                          "Name it rows.png.")
    check_writable(path)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Time against bytes, the median of the sweeps, one curve per algorithm; the model's prediction dotted beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    curves = dict.fromkeys((row.algorithm, row.buffers) for row in rows)
    for algorithm, buffers in curves:
        mine: dict[int, list[Row]] = {}
        for row in rows:
            if (row.algorithm, row.buffers) == (algorithm, buffers):
                mine.setdefault(row.bytes, []).append(row)
        name = algorithm if len({buffers for _, buffers in curves}) == 1 else f"{algorithm}, {buffers}"
        times, predictions = ([median(getattr(row, field) for row in same) for same in mine.values()]
                              for field in ("time_us", "predicted_us"))
        drawn, = axes.plot(list(mine), times, marker=".", label=name)
        axes.plot(list(mine), predictions, ":", color=drawn.get_color())
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds (dotted: predicted)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
