"""Pages of explanations: one self-contained HTML file with a slider, for a screen of 1280 x 720."""

import html
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from mpitrain.files import write_whole
from mpitrain.tools.textbook.explain.explanation import Explanation
from mpitrain.tools.textbook.explain.renderers.colours import colour, summands
from mpitrain.tools.textbook.explain.renderers.terminal import (
    formula_line,
    frame_title,
    source_text,
)
from mpitrain.tools.textbook.explain.topics import TOPICS
from mpitrain.tools.textbook.words import text

ROOM = "mpitrain.tools.textbook.explain.renderers"


def write(explanation: Explanation, path: Path, language: str) -> None:
    """Write the page of a topic.

    raises  OSError if the file cannot be written
    """
    _fill(
        path, "page.html", language, explanation.title.into(language), data(explanation, language)
    )


def write_all(folder: Path, language: str) -> Iterator[str]:
    """Record all topics that run here, and write a page for each and an index.

    yields  each name when it is done
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorded = {name: topic for name, topic in TOPICS.items() if topic.runs_here}
    for name, topic in recorded.items():
        write(
            topic.record(name, topic.setting(name, None, None)), folder / f"{name}.html", language
        )
        yield name
    title = text("How distributed training works: {n} topics", language, n=len(recorded))
    topics = [
        {"name": name, "title": topic.title.into(language)} for name, topic in recorded.items()
    ]
    _fill(folder / "index.html", "index.html", language, title, {"topics": topics})


def data(explanation: Explanation, language: str) -> dict[str, Any]:
    """Return the contents of a page as JSON, all texts in the language."""
    most = max(
        summands(cell) for frame in explanation.frames for row in frame.cells for cell in row
    )
    frames = []
    for number, frame in enumerate(explanation.frames):
        changed = frame.changed(explanation.frames[number - 1] if number else None)
        frames.append(
            {
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
        "sentences": [sentence.into(language) for sentence in explanation.sentences],
        "legend": explanation.legend.into(language),
        "rows": [row.into(language) for row in explanation.rows],
        "columns": [
            [group.heading.into(language), *group.named(language)] for group in explanation.columns
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
            "sent": text("bytes sent", language),
            "play": text("play", language),
            "stop": text("stop", language),
        },
    }


def _fill(path: Path, template: str, language: str, title: str, contents: dict[str, Any]) -> None:
    """Write a template with its title and contents; the contents cannot end their script."""
    page = resources.files(ROOM).joinpath(template).read_text(encoding="utf-8")
    filled = json.dumps(contents, ensure_ascii=False).replace("<", "\\u003c")
    page = page.replace("{language}", language).replace("{title}", html.escape(title))
    write_whole(path, page.replace("{contents}", filled))
