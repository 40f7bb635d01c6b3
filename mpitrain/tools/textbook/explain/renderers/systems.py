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


def page(explanations: Mapping[str, Explanation]) -> str:
    """Return the page of these explanations, by the names of their topics."""
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
        f"**{explanation.title.into('en')}.**",
        fill(" ".join(sentence.into("en") for sentence in explanation.sentences), COLUMNS),
        "",
        "```bash",
        f"mpitrain learn explain {name}",
        explanation.command,
        "```",
        "",
        f"![{name}]({name}.png)",
        "",
        fill(explanation.legend.into("en"), COLUMNS),
        "",
        *(f"- {formula_line(formula, 'en')}" for formula in explanation.formulas),
        f"- read: {files}",
        f"- proven by: {laws}",
    ]


def digests(explanations: Mapping[str, Explanation]) -> str:
    """Return a digest of the frames of each topic, as JSON: a picture is current if it is the same."""
    return (
        json.dumps(
            {
                name: hashlib.sha256(
                    json.dumps(
                        [[frame.title.into("en"), frame.cells] for _, frame in explanation.drawn]
                    ).encode()
                ).hexdigest()
                for name, explanation in explanations.items()
            },
            indent=1,
        )
        + "\n"
    )
