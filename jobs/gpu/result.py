"""One result of the GPU job: a line of JSON, written the moment it is known, so that what was measured survives a kill."""

import json
from typing import Any


def emit(
    what: str,
    ours: str = "-",
    peer: str = "-",
    *,
    ratio: float | None = None,
    required: float | None = None,
    goal: float | None = None,
    predicted: str = "-",
    ok: bool = True,
    **facts: Any,
) -> None:
    """Print a result.

    what          in words; `ours` and `peer` with their units
    ratio         theirs over ours in time, ours over theirs in rate: above 1 is faster than the peer
    required      what the ratio must be; less is a fault
    goal          what it shall be one day; less is none
    predicted     on paper, with its unit: what `ours` should be
    ok            False if something is wrong, whatever the ratio
    facts         numbers beside it, for whoever reads the file
    """
    line = {
        "what": what,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "required": required,
        "goal": goal,
        "predicted": predicted,
        "ok": ok,
        **facts,
    }
    print(json.dumps(line), flush=True)


def micro(seconds: float) -> str:
    """Microseconds for a table."""
    return f"{1e6 * seconds:,.1f} us"


def wrong_words(wrong: int) -> str:
    """What is added to the name of a row with wrong elements."""
    return f", {wrong} wrong" if wrong else ""
