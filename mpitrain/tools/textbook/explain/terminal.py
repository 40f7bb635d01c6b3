"""Explanations as text for a terminal: a table for each frame, in aligned columns."""

from collections.abc import Iterator, Mapping, Sequence

from mpitrain.tools.textbook.explain.explanation import (
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Topic,
)
from mpitrain.tools.words import korean, padded, text, width

GAP = "  "
MOST_ARROWS = 8
"""Largest number of messages in the title of a step; an ellipsis stands for the others."""


def heading(explanation: Explanation, language: str) -> list[str]:
    return [
        text(explanation.title, language),
        "",
        *(text(sentence, language) for sentence in explanation.sentences),
        "",
        text(explanation.legend, language),
    ]


def frames(explanation: Explanation, language: str, columns: int) -> Iterator[list[str]]:
    """Yield the lines of each frame.

    columns  width of the terminal; groups of columns that do not fit are put below each other
    """
    before: Frame | None = None
    for frame in explanation.frames:
        yield frame_lines(explanation, frame, before, language, columns)
        before = frame


def frame_lines(
    explanation: Explanation, frame: Frame, before: Frame | None, language: str, columns: int
) -> list[str]:
    """Return a frame as a table; `*` marks cells that the step has changed."""
    changed = frame.changed(before)
    labels = ["", *(text(row, language) for row in explanation.rows)]
    margin = max(map(width, labels))
    lines, first = ["", frame_title(frame, language)], 0
    bands: list[list[list[str]]] = []
    for group in explanation.columns:
        cells = [
            [
                (cell or "-") + "*" * ((row, at) in changed)
                for at, cell in enumerate(contents[first : first + len(group.names)], first)
            ]
            for row, contents in enumerate(frame.cells)
        ]
        names = group.named(language)
        for run in _runs([names, *cells], columns - margin - len(GAP)):
            heading_text = text(group.heading, language)
            bands.append([[heading_text], *([*row[run]] for row in (names, *cells))])
        first += len(group.names)
    if frame.sent:
        bands.append(
            [[""], [text("bytes sent", language)], *([f"{nbytes:,}"] for nbytes in frame.sent)]
        )
    texts = [_block(band) for band in bands]
    while texts:
        room, taken = columns - margin, 0
        for block_lines in texts:
            room -= len(GAP) + width(block_lines[0])
            if room < 0 and taken:
                break
            taken += 1
        row_texts = zip(*texts[:taken], strict=True)
        shown = ["", *labels]
        for label, parts in zip(shown, row_texts, strict=True):
            lines.append((padded(label, margin) + GAP + GAP.join(parts)).rstrip())
        del texts[:taken]
    return lines


def frame_title(frame: Frame, language: str) -> str:
    title = text(frame.title, language)
    if frame.messages:
        arrows = " ".join(
            f"{source}→{target}" for source, target, _ in frame.messages[:MOST_ARROWS]
        )
        rest = " ..." if len(frame.messages) > MOST_ARROWS else ""
        title += GAP + text("messages", language) + f" {arrows}{rest}"
    if frame.seconds is not None:
        title += f"{GAP}{1e3 * frame.seconds:.2f} ms"
    return title


def _runs(rows: Sequence[Sequence[str]], room: int) -> Iterator[slice]:
    """Yield slices of consecutive columns that fit into the width `room`."""
    first = taken = 0
    for at in range(len(rows[0])):
        wide = max(width(row[at]) for row in rows) + len(GAP)
        if taken and taken + wide > room:
            yield slice(first, at)
            first, taken = at, 0
        taken += wide
    yield slice(first, len(rows[0]))


def _block(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a group of columns, all of one width: a heading, names, and cells."""
    heading_text, names, cells = rows[0][0], rows[1], rows[2:]
    widths = [max(width(row[at]) for row in (names, *cells)) for at in range(len(names))]
    total = max(sum(widths) + len(GAP) * (len(widths) - 1), width(heading_text))
    lines = [
        GAP.join(padded(cell, w) for cell, w in zip(row, widths, strict=True))
        for row in (names, *cells)
    ]
    return [padded(line, total) for line in (heading_text, *lines)]


def ending(explanation: Explanation, language: str) -> list[str]:
    seconds = [frame.seconds for frame in explanation.frames if frame.seconds is not None]
    total = text("time of all steps: {ms} ms", language, ms=f"{1e3 * sum(seconds):.1f}")
    return [
        "",
        *([total] if seconds else []),
        *(formula_line(formula, language) for formula in explanation.formulas),
        "",
        f"{text('source', language)}: " + ", ".join(map(source_text, explanation.sources)),
        f"{text('command', language)}: {explanation.command}",
        f"{text('tests', language)}: {', '.join(explanation.laws)}",
    ]


def formula_line(formula: CountedFormula, language: str) -> str:
    sign = "=" if formula.agrees else "≠"
    counted, value = (
        f"{x:,.0f}" if x == int(x) else f"{x:,.4g}" for x in (formula.counted, formula.value)
    )
    words = korean().get(formula.words, formula.words) if language == "ko" else formula.words
    return f"{text(formula.name, language)}: {counted} {sign} {words} = {value}"


def source_text(source: SourceLines) -> str:
    return f"{source.file}:{source.line} ({source.name})"


def listing(
    topics: Mapping[str, Topic], parts: Mapping[str, Sequence[str]], language: str
) -> list[str]:
    """Return a line for each topic, below the part of a lecture to which it belongs."""
    margin = max(map(len, topics))
    headings = {names[0]: text(part, language) for part, names in parts.items()}
    return [
        line
        for name, topic in topics.items()
        for line in (
            *([headings[name]] if name in headings else []),
            f"  {padded(name, margin)}{GAP}{text(topic.title, language)}",
        )
    ]
