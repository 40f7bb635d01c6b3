"""The report as one page of HTML that needs no other file."""

import base64
import html
import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from mpitrain.errors import visible
from mpitrain.files import contents, write_whole

STYLE = (
    "body { font: 15px sans-serif; max-width: 1300px; margin: 2em auto; padding: 0 1em } img { width: 100% } "
    "p { overflow-wrap: anywhere; margin: 0.4em 0 } pre { background: #f4f4f4; padding: 1em; overflow-x: auto }"
)


class PageSection(NamedTuple):
    """Section of the page about one run.

    words     text of the report
    timeline  PNG file, or None
    perfetto  trace file for Perfetto, or None
    """

    words: str
    timeline: Path | None
    perfetto: Path | None = None


def write_page(path: Path, runs: Mapping[str, PageSection], metrics: Path) -> None:
    """Write the page.

    runs     sections by the runs' names
    metrics  PNG file with the metrics of all runs
    """
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>mpitrain runs report</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>mpitrain runs report</h1>"
    ]
    for name, section in runs.items():
        parts += [f"<h2>{html.escape(visible(name))}</h2>", *_paragraphs(section.words)]
        if section.timeline:
            parts.append(_image(section.timeline, f"timeline of {name}"))
        if section.perfetto:
            link = quote(os.path.relpath(section.perfetto, path.parent), errors="surrogateescape")
            parts.append(
                f'<p><a href="{link}">{section.perfetto.name}</a>: what the ranks have noted, for ui.perfetto.dev</p>'
            )
    parts += [
        f"<h2>Metrics</h2>\n{_image(metrics, 'loss, learning rate, throughput and memory')}",
        "</body></html>\n",
    ]
    write_whole(path, "\n".join(parts), inner=2)


def _paragraphs(words: str) -> Iterator[str]:
    """Yield sentences as paragraphs, and indented lines (tables, lists) as preformatted text."""
    for is_table, lines in groupby(words.splitlines(), lambda line: line.startswith(" ")):
        if is_table:
            yield "<pre>" + html.escape("\n".join(lines)) + "</pre>"
        else:
            yield from (f"<p>{html.escape(line)}</p>" for line in lines)


def _image(path: Path, what: str) -> str:
    data = base64.b64encode(contents(path, inner=2)).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/png;base64,{data}">'
