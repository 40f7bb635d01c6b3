"""Shared code of all plots: matplotlib without a display, checks of the file, and saving."""

import logging
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files import check_writable, whole


def painter() -> Any:
    """Return matplotlib's pyplot with the Agg backend, which needs no display.

    Warnings of matplotlib, such as that of a missing font cache folder, are silenced.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_drawable(path: Path, option: str = "--plot") -> None:
    """Raise ConfigError unless matplotlib is installed, knows the format, and can write there."""
    try:
        painter()
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(
            f"{option} needs matplotlib, which is not installed.", "pip install 'mpitrain[report]'"
        ) from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(
            f"{option} draws files that end in {', '.join(sorted(known))}, but this is {path}.",
            "Name it rows.png.",
        )
    check_writable(path)


def save(figure: Any, path: Path, dpi: int, inner: int = 0) -> None:
    """Save a figure atomically, in the format of the file's suffix.

    inner   how many names at the end of the path must not be links; see `files.reading`
    raises  OSError if the file cannot be written
    """
    with whole(path, inner) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".").lower(), dpi=dpi)
