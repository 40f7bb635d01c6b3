"""A collective as text and as JSON: messages and contents of each step, and totals."""

import json
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from mpitrain.tools.plan import several
from mpitrain.tools.plan.collective import (
    ChunkMessage,
    Collective,
    HalvesBoundary,
    Held,
    complete,
    contents,
    data_of,
    listed,
    meeting,
)
from mpitrain.tools.plan.traffic import FORMULAS, sent_by, table_of_totals, totals

LINES = 200
"""Largest number of lines for messages and contents; a longer collective has one line per step."""

ENDS, NEAR = 4, 2
"""Number of steps that are printed of a longer collective.

ENDS steps are printed at each end. NEAR steps are printed on each side of the boundary between the
reduce-scatter and the all-gather of an all-reduce.
"""

MARGIN = 9
"""Number of columns before the messages of a step."""

SIGNS = 10
"""Width of the symbol column of a legend, in characters."""

Cell = Callable[[int, int], str]
"""Function: (contents of a chunk, its number) -> the text that is printed for the chunk."""


def printed(collective: Collective, width: int) -> list[str]:
    """Return the whole text. Lines of its steps have at most `width` characters.

    If they fit, the ranks that contributed to each chunk are named; otherwise they are counted. If
    that does not fit either, each step is one line.
    """
    title = (
        f"{collective.title}: the array is cut into {several(len(collective.bounds), 'chunk')}, "
        f"{several(len(collective.steps), 'step')}"
    )
    body, meaning = _body(collective, width)
    signs = (f"{sign:<{SIGNS}}{text}" for sign, text in (*_signs(collective), meaning))
    return [title, "", *signs, "", *body, "", *table_of_totals(collective)]


def _body(collective: Collective, width: int) -> tuple[list[str], tuple[str, str]]:
    for cell, meaning in (_named(collective), _counted(collective)):
        lines = _table(collective, cell, width)
        if len(lines) <= LINES and max(map(len, lines)) <= width:
            return lines, ("contents", f"a row per rank, a column per chunk: {meaning}")
    return _overview(collective, width), (
        "complete",
        f"of its {several(len(collective.bounds), 'chunk')} a rank holds so many complete "
        "after the step: the rank with the fewest .. the one with the most",
    )


def _named(collective: Collective) -> tuple[Cell, str]:
    """Return the form of a chunk that names the ranks of its data, and the legend of this form."""
    if collective.operation == "all-gather":
        return lambda data, chunk: data_of(data), "the rank whose data it holds; - none yet"
    whole, meanings = complete(collective), ["0 is what rank 0 had"]
    meanings += ["0+1 the sum of what ranks 0 and 1 had"] * (collective.ranks > 2)
    meanings += ["0-2 that of ranks 0 to 2"] * (collective.ranks > 3)
    return (
        lambda data, chunk: "all" if data == whole[chunk] else data_of(data),
        ", ".join([*meanings, "all the sum over all ranks"]),
    )


def _counted(collective: Collective) -> tuple[Cell, str]:
    meaning = f"of how many of the {several(collective.ranks, 'rank')} it holds the data"
    return lambda data, chunk: f"{data.bit_count()}", meaning


def _signs(collective: Collective) -> list[tuple[str, str]]:
    messages = [message for step in collective.steps for message in step]
    firsts = [
        next((m for m in messages if m.combine == combine), None) for combine in (True, False)
    ]
    signs = []
    for m in filter(None, firsts):
        what = f"chunk {m.first}" if m.last - m.first == 1 else f"chunks {m.first} to {m.last - 1}"
        what = "the whole array" if m.last - m.first == len(collective.bounds) else what
        end = "adds it to its own" if m.combine else "puts it in the place of its own"
        sign = _message(collective, m).replace("\N{NO-BREAK SPACE}", " ")
        signs.append((sign, f"rank {m.source} sends {what} to rank {m.target}, which {end}"))
    together = next(
        (m for m in messages if 1 < m.last - m.first < len(collective.bounds) and m not in firsts),
        None,
    )
    if together:
        meaning = f"chunks {together.first} to {together.last - 1} in one message"
        signs.append((_chunks(collective, together), meaning))
    return signs


def _chunks(collective: Collective, message: ChunkMessage) -> str:
    """Return the chunks of a message as text: 2, 0-3, or all."""
    count = message.last - message.first
    if count == len(collective.bounds):
        return "all"
    return f"{message.first}-{message.last - 1}" if count > 1 else f"{message.first}"


def _message(collective: Collective, message: ChunkMessage) -> str:
    """Return a message as text, such as 0>1 +2-3, without a space where a line could break."""
    sign = "+" if message.combine else "="
    return (
        f"{message.source}>{message.target}\N{NO-BREAK SPACE}{sign}{_chunks(collective, message)}"
    )


def _halves(met: HalvesBoundary | None, step: int) -> list[str]:
    if not met or met.step != step:
        return []
    return [f"-- the halves meet: {met.first} done, {met.second} begins --"]


def _table(collective: Collective, cell: Cell, width: int) -> list[str]:
    """Return the messages of each step, and the contents after it. The table ends behind LINES
    lines.
    """
    lines: list[str] = []
    met = meeting(collective)
    for step, held in enumerate(contents(collective)):
        if len(lines) > LINES:
            break
        messages = collective.steps[step - 1] if step else ()
        text = "   ".join(_message(collective, message) for message in messages)
        lines += textwrap.wrap(
            text, width, initial_indent=f"step {step:<{MARGIN - 5}}", subsequent_indent=" " * MARGIN
        ) or ["start"]
        lines += [*_rows(held, cell, is_first=step == 0), *_halves(met, step)]
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _rows(held: Held, cell: Cell, is_first: bool) -> list[str]:
    """Return a row for each rank; ranks with the same contents share a row.

    is_first  whether a row of chunk numbers is put first
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, chunks in enumerate(held):
        rows.setdefault(tuple(cell(data, chunk) for chunk, data in enumerate(chunks)), []).append(
            rank
        )
    lines = {
        f"rank{'s' if ranks[1:] else ''} {listed(ranks, ',')}": cells
        for cells, ranks in rows.items()
    }
    if is_first:
        lines = {"chunk": tuple(map(str, range(len(held[0])))), **lines}
    margin = max(MARGIN + 8, *(3 + MARGIN + len(name) for name in lines))
    width = max(len(text) for cells in lines.values() for text in cells)
    return [
        (" " * MARGIN + name).ljust(margin)
        + "  ".join(text.ljust(width) for text in cells).rstrip()
        for name, cells in lines.items()
    ]


def _overview(collective: Collective, width: int) -> list[str]:
    """Return one line for each of the first and last steps.

    The steps where the halves of an all-reduce meet are listed, too (see ENDS and NEAR).
    """
    met, last = meeting(collective), len(collective.steps)
    shown = {*range(1, ENDS + 1), *range(last - ENDS + 1, last + 1)}
    shown |= {*range(met.step - NEAR + 1, met.step + NEAR + 1)} if met else set()
    whole = complete(collective)
    lines, before = [f"{'step':<{MARGIN}}{'messages':>8}  {'complete':>{MARGIN}}   for example"], 0
    for step, held in enumerate(contents(collective)):
        if step not in shown:
            continue
        if step > before + 1:
            lines.append(f"...      {several(step - before - 1, 'step')} like these")
        before, messages = step, collective.steps[step - 1]
        least, most = (
            limit(sum(map(int.__eq__, chunks, whole)) for chunks in held) for limit in (min, max)
        )
        line = f"step {step:<{MARGIN - 5}}{len(messages):>8}  {f'{least} .. {most}':>{MARGIN}}"
        for message in messages:
            text = f"   {_message(collective, message)}"
            if len(line + text) + (message is not messages[-1]) * len("   ...") > width:
                line += "   ..."
                break
            line += text
        lines += [line.replace("\N{NO-BREAK SPACE}", " "), *_halves(met, step)]
    return lines


def as_json(collective: Collective) -> str:
    """Return the text of the JSON file: a header, then a line for each step.

    chunks    in the header: [start, stop] of each chunk, as fractions of the array; in a message:
              the first chunk and the one after the last
    contents  {rank: {chunk: contributing ranks}} of the chunks that the step changed; "0-2+5" means
              ranks 0, 1, 2 and 5
    """
    met, counted = meeting(collective), totals(collective)
    formula = FORMULAS.get((collective.operation, collective.algorithm))
    texts = formula[:4] if formula else (None,) * 4
    header: dict[str, Any] = {
        "operation": collective.operation,
        "algorithm": collective.algorithm,
        "ranks": collective.ranks,
        "hosts": collective.hosts,
        "chunks": [
            [start / collective.elements, stop / collective.elements]
            for start, stop in collective.bounds
        ],
        "halves_meet": met._asdict() if met else None,
        "totals": {
            name: {"counted": float(count), "formula": text}
            for name, count, text in zip(counted._fields, counted, texts, strict=True)
        },
        "sent_by_rank": [float(arrays) for arrays in sent_by(collective)],
    }
    copies = ([[*chunks] for chunks in held] for held in contents(collective))
    steps: list[dict[str, Any]] = []
    for number, (before, after) in enumerate(pairwise(copies), 1):
        changed = {
            rank: {
                chunk: data_of(data)
                for chunk, data in enumerate(chunks)
                if data != before[rank][chunk]
            }
            for rank, chunks in enumerate(after)
            if chunks != before[rank]
        }
        steps.append(
            {
                "step": number,
                "contents": changed,
                "messages": [
                    {
                        "source": m.source,
                        "target": m.target,
                        "chunks": [m.first, m.last],
                        "adds": m.combine,
                    }
                    for m in collective.steps[number - 1]
                ],
            }
        )
    lines = ",\n".join(map(json.dumps, steps))
    return f'{{"header": {json.dumps(header)},\n"steps": [\n{lines}\n]}}\n'
