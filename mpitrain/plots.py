"""What all pictures share: matplotlib without a screen, the check of a file before it is drawn, and how it is saved."""

import logging
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.files import check_writable, whole


def painter() -> Any:
    """matplotlib's pyplot, which needs no screen here, and tells nobody that it found no folder to keep its fonts in."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_drawable(path: Path, option: str = "--plot") -> None:
    """ConfigError unless a picture can be drawn there: without matplotlib, or in a format it does not know."""
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
    """Save a figure in the format of the file's suffix, whole or not at all.

    inner  as of `files.reading`: names at the path's end that must be no links
    raises OSError if the file cannot be written
    """
    with whole(path, inner) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".").lower(), dpi=dpi)
