"""A collective as JSON: each message of each step, and the chunks that it changes."""

import json
from itertools import pairwise
from typing import Any

from mpitrain.tools.plan.collective import Collective, contents, meeting
from mpitrain.tools.plan.traffic import FORMULAS, sent_by, totals
from mpitrain.tools.plan.words import data_of


def written(collective: Collective) -> str:
    """Return the text of the file: a header, then a line for each step.

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
