"""The report as one page of HTML that needs no other file."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import visible
from mpitrain.files import contents, write_whole

STYLE = ("body { font: 15px sans-serif; max-width: 1300px; margin: 2em auto; padding: 0 1em } img { width: 100% } "
         "pre { background: #f4f4f4; padding: 1em; overflow-x: auto }")


class Section(NamedTuple):
    """What a page says of one run: words, the PNG file of its timeline, if there is one, and whether its trace was written."""

    words: str
    timeline: Path | None
    has_trace: bool = False


def write_page(path: Path, runs: Mapping[str, Section], metrics: Path) -> None:
    """Write the page. runs: by their names; metrics: the PNG file of all of them."""
    parts = ["<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>mpitrain report</title>"
             f"<style>{STYLE}</style></head><body>\n<h1>mpitrain report</h1>"]
    for name, section in runs.items():
        parts.append(f"<h2>{html.escape(visible(name))}</h2>\n<pre>{html.escape(section.words)}</pre>")
        if section.timeline:
            parts.append(_image(section.timeline, f"timeline of {name}"))
    parts += [f"<h2>Metrics</h2>\n{_image(metrics, 'loss, learning rate, throughput and memory')}", "</body></html>\n"]
    write_whole(path, "\n".join(parts), inner=2)


def _image(path: Path, what: str) -> str:
    data = base64.b64encode(contents(path, inner=2)).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'
