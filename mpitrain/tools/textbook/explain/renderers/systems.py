"""The page of all systems, in Markdown: idea, command, picture, figures, files and tests of each."""

import hashlib
import json
from collections.abc import Mapping
from textwrap import fill

from mpitrain.tools.textbook.explain.explanation import Explanation
from mpitrain.tools.textbook.explain.renderers.terminal import formula_line

PICTURES = "mpitrain/tools/textbook/pictures"
"""The folder of the page and its pictures; it is not installed."""
FRAMES = "frames.json"
"""The file with the digest of the frames in each picture."""
COLUMNS = 130


def page(found: Mapping[str, Explanation]) -> str:
    """Return the page.

    found  {topic: its explanation}
    """
    lines = [
        "# The systems, one by one",
        "",
        fill(
            "`python jobs/textbook.py` has written this page and its pictures from recordings of the code. A cell "
            "with an orange frame has changed in that step; the greener a cell, the more summands it has. "
            "[The textbook](../README.md) explains the cells.",
            COLUMNS,
        ),
        "",
        fill(", ".join(f"[{name}](#{name})" for name in found), COLUMNS, break_on_hyphens=False),
    ]
    for name, each in found.items():
        lines += ["", f"## {name}", "", *_section(name, each)]
    return "\n".join(lines) + "\n"


def _section(name: str, each: Explanation) -> list[str]:
    """Return the lines of one system."""
    files = ", ".join(
        f"[`{source.name}`](../../../{source.file.removeprefix('mpitrain/')})"
        for source in each.sources
    )
    laws = ", ".join(f"[`{law}`](../../../../{law})" for law in each.laws)
    return [
        f"**{each.title.into('en')}.**",
        fill(" ".join(sentence.into("en") for sentence in each.sentences), COLUMNS),
        "",
        "```bash",
        f"mpitrain explain {name}",
        each.command,
        "```",
        "",
        f"![{name}]({name}.png)",
        "",
        fill(each.legend.into("en"), COLUMNS),
        "",
        *(f"- {formula_line(formula, 'en')}" for formula in each.formulas),
        f"- read: {files}",
        f"- proven by: {laws}",
    ]


def digests(found: Mapping[str, Explanation]) -> str:
    """Return a digest of the frames of each topic, as JSON: a picture is current if it is the same."""
    return (
        json.dumps(
            {
                name: hashlib.sha256(
                    json.dumps(
                        [[frame.title.into("en"), frame.cells] for _, frame in each.drawn]
                    ).encode()
                ).hexdigest()
                for name, each in found.items()
            },
            indent=1,
        )
        + "\n"
    )
