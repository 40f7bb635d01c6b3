"""Draw docstrings and comments of the package at random, for a reader who has not seen the code.

`python jobs/reading/sample.py SEED [COUNT]` prints them numbered. Each has its place and the code that a
reader sees next to it: the signature, the assignment above, or the line below a comment.
"""

import random
import sys
from pathlib import Path

from text import Prose, prose

PACKAGE = Path(__file__).parents[2] / "mpitrain"


def neighbour(each: Prose) -> str:
    """Return the code next to a docstring or comment."""
    lines = each.path.read_text(encoding="utf-8").splitlines()
    if each.kind == "comment":
        below = [line for line in lines[each.line - 1 :] if not line.lstrip().startswith("#")]
        return below[0].strip() if below else ""
    at = each.line - 1
    if lines[at].lstrip().startswith(("def ", "class ", "async ", "@")):
        end = next(row for row in range(at, len(lines)) if lines[row].rstrip().endswith(":"))
        return "\n".join(lines[at : end + 1])
    return lines[at - 1].strip() if at else "(the whole module)"


def main() -> None:
    """Print the sample."""
    seed, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 60
    for number, each in enumerate(random.Random(seed).sample(list(prose(PACKAGE)), count), 1):
        print(f"--- {number}. {each.kind}, {each.path.relative_to(PACKAGE)}:{each.line}")
        print(f"{neighbour(each)}\n\n{each.text.rstrip()}\n")


if __name__ == "__main__":
    main()
