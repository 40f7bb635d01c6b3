"""Pages of explanations: an HTML file for each topic, with a slider, and one page in Markdown with all.

An HTML file needs no other file, and fits a screen of 1280 x 720.
"""

import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from textwrap import fill
from typing import Any

from mpitrain.files import write_whole
from mpitrain.tools.textbook.explain.explanation import Explanation
from mpitrain.tools.textbook.explain.picture import colour, summands
from mpitrain.tools.textbook.explain.terminal import formula_line, frame_title, source_text
from mpitrain.tools.textbook.explain.topics import PARTS, TOPICS
from mpitrain.tools.words import text

ROOM = "mpitrain.tools.textbook.explain"
PICTURES = "mpitrain/tools/textbook/pictures"
"""The folder of the page and its pictures; it is not installed."""
FRAMES = "frames.json"
"""The file with the digest of the frames in each picture."""
COLUMNS = 130
INDEX = (
    '<!DOCTYPE html>\n<html lang="{}"><meta charset="utf-8"><title>{}</title><style>body {{ font: '
    "17px/1.6 sans-serif; margin: 20px auto; max-width: 1000px }} p {{ margin: 0 }}</style>\n"
)
"""Head of the index, with places for its language and its title."""


def whole(explanation: Explanation, language: str) -> str:
    page = resources.files(ROOM).joinpath("page.html").read_text(encoding="utf-8")
    title = html.escape(text(explanation.title, language))
    # No text can end the script element that holds the contents.
    contents = json.dumps(data(explanation, language), ensure_ascii=False).replace("<", "\\u003c")
    page = page.replace("{language}", language).replace("{title}", title)
    return page.replace("{contents}", contents)


def write(explanation: Explanation, path: Path, language: str) -> None:
    write_whole(path, whole(explanation, language))


def write_all(folder: Path, language: str) -> Iterator[str]:
    """Record all topics that this machine can run; write a page for each, and an index.

    yields  the name of each topic when its page is written
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {name: topic for name, topic in TOPICS.items() if topic.runs_here}
    for name, topic in recorded.items():
        write(topic.explained(topic.setting(name)), folder / f"{name}.html", language)
        yield name
    title = text("How distributed training works: {n} topics", language, n=len(recorded))
    lines = [f"<h1>{html.escape(title)}</h1>"]
    for part, names in PARTS.items():
        lines.append(f"<h2>{html.escape(text(part, language))}</h2>")
        for name in filter(recorded.get, names):
            said = html.escape(text(recorded[name].title, language))
            lines.append(f'<p><a href="{name}.html">{name}</a> {said}</p>')
    write_whole(folder / "index.html", INDEX.format(language, title) + "\n".join(lines) + "\n")


def data(explanation: Explanation, language: str) -> dict[str, Any]:
    most = max(
        summands(cell) for frame in explanation.frames for row in frame.cells for cell in row
    )
    frames = []
    for number, frame in enumerate(explanation.frames):
        changed = frame.changed(explanation.frames[number - 1] if number else None)
        frames.append(
            {
                "messages": frame.messages,
                "title": frame_title(frame, language),
                "cells": [
                    [
                        [cell, colour(cell, most), int((row, column) in changed)]
                        for column, cell in enumerate(cells)
                    ]
                    for row, cells in enumerate(frame.cells)
                ],
                "sent": [f"{nbytes:,}" for nbytes in frame.sent],
            }
        )
    return {
        "sentences": [text(sentence, language) for sentence in explanation.sentences],
        "legend": text(explanation.legend, language),
        "rows": [text(row, language) for row in explanation.rows],
        "columns": [
            [text(group.heading, language), *group.named(language)] for group in explanation.columns
        ],
        "frames": frames,
        "notes": [
            [
                text("formula", language),
                "; ".join(formula_line(f, language) for f in explanation.formulas),
            ],
            [text("source", language), ", ".join(map(source_text, explanation.sources))],
            [text("command", language), explanation.command],
            [text("tests", language), ", ".join(explanation.laws)],
        ],
        "words": {
            word.split()[-1]: text(word, language) for word in ("bytes sent", "play", "stop")
        },
    }


def systems(explanations: Mapping[str, Explanation]) -> str:
    """Return the Markdown page of all topics.

    explanations  {name of the topic: explanation}
    """
    lines = [
        "# The systems, one by one",
        "",
        fill(
            "`python jobs/prove/textbook.py` has written this page and its pictures from recordings of the code. A picture "
            "shows a chart, or the step that changes most. A cell with an orange frame has changed in that step; the "
            "greener a cell, the more summands it has. "
            "[The textbook](../README.md) explains the cells. `mpitrain learn explain NAME` shows "
            "all steps of a section. The command in it shows the same in a real run.",
            COLUMNS,
        ),
        "",
        fill(
            ", ".join(f"[{name}](#{name})" for name in explanations),
            COLUMNS,
            break_on_hyphens=False,
        ),
    ]
    for name, explanation in explanations.items():
        lines += ["", f"## {name}", "", *_section(name, explanation)]
    return "\n".join(lines) + "\n"


def _section(name: str, explanation: Explanation) -> list[str]:
    files = ", ".join(
        f"[`{source.name}`](../../../{source.file.removeprefix('mpitrain/')})"
        for source in explanation.sources
    )
    laws = ", ".join(f"[`{law}`](../../../../{law})" for law in explanation.laws)
    return [
        f"**{explanation.title}.**",
        fill(" ".join(explanation.sentences), COLUMNS),
        "",
        "```bash",
        explanation.command,
        "```",
        "",
        f"![{name}]({name}.png)",
        "",
        fill(explanation.legend, COLUMNS),
        "",
        *(f"- {formula_line(formula, 'en')}" for formula in explanation.formulas),
        f"- read: {files}",
        f"- proven by: {laws}",
    ]


def digests(explanations: Mapping[str, Explanation]) -> str:
    """Return a digest of the frames of each topic, as JSON.

    A picture is current if the digest that was stored with it is the same.
    """
    drawn = {
        name: json.dumps([[frame.title, frame.cells] for frame in explanation.frames])
        for name, explanation in explanations.items()
    }
    digest = {name: hashlib.sha256(each.encode()).hexdigest() for name, each in drawn.items()}
    return json.dumps(digest, indent=1) + "\n"
