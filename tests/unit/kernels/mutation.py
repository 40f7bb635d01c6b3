"""Breaks the kernels one place at a time, and asks whether their cases notice.

A mutant is a copy of the sources with one barrier, one wait for asynchronous copies, or one atomic removed, or with one
comparison against an edge weakened by one. `python -m tests.unit.kernels.mutation` runs them all (about ten minutes) and
prints those that nobody noticed; the tests run a fixed sample.
"""

import random
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import FOLDER
from tests.unit.kernels.cases.suite import SUITE

# What a comparison with it on the right guards an edge. Loops over tiles of fixed size are none.
EDGES = ("M|N|K|T|C|V|n|B|P|HEAD|end|rows|columns|count|used|work|warps|found|left|splits|k_end|k_left|t0|t|share\\.end")
MUTATIONS = {
    "barrier removed": (re.compile(r"__sync(?:threads|warp)\(\);"), ";"),
    "wait removed": (re.compile(r"copy_async_wait<[^>]*>\(\);"), ";"),
    "atomic made plain": (re.compile(r"atomicAdd\(&(\w+\[[^,]+), 1u\)"), r"\1 += 1u"),
    "edge moved": (re.compile(rf"(?<![<>=])(<|>=|<=) (?=(?:{EDGES})\b(?! [*/]))"), None),
    "remainder ignored": (re.compile(r"min\(n - i, (4)LL\)|min\((32), V - v0\)"), r"\1\2"),
}
MOVED = {"<": "<= ", ">=": "> ", "<=": "<= 1 + "}

EQUIVALENT: dict[tuple[str, str], str] = {}
"""(file, line of source) -> why the mutant behaves like the original."""


class Mutant(NamedTuple):
    """One change: where, what, and the text of the whole changed file."""

    file: str
    line: int
    kind: str
    before: str
    text: str

    @property
    def known(self) -> str | None:
        """Why it is equivalent, if it is."""
        return EQUIVALENT.get((self.file, self.before))


def mutants() -> list[Mutant]:
    """Every mutant of every source and header, in the order of the files."""
    found = []
    for path in sorted(FOLDER.glob("*.cu*")):
        text = path.read_text()
        code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
        for kind, (pattern, replacement) in MUTATIONS.items():
            for match in pattern.finditer(code):
                new = MOVED[match[1]] if replacement is None else match.expand(replacement)
                line = text.count("\n", 0, match.start()) + 1
                found.append(Mutant(path.name, line, kind, text.splitlines()[line - 1].strip(),
                                    text[:match.start()] + new + text[match.end():]))
    return found


def sources_with(file: str) -> list[str]:
    """The sources that a changed file goes into."""
    if file.endswith(".cu"):
        return [file.removesuffix(".cu")]
    names, found = {file}, []
    headers = {path.name: path.read_text() for path in FOLDER.glob("*.cuh")}
    for _ in headers:
        names |= {name for name, text in headers.items() if any(f'"{used}"' in text for used in names)}
    for path in sorted(FOLDER.glob("*.cu")):
        if any(f'"{name}"' in path.read_text() for name in names):
            found.append(path.stem)
    return found


def notice(mutant: Mutant) -> str | None:
    """Who noticed, in one line; None if nobody did."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "kernels"
        shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "simulator", "__pycache__"))
        (sources / mutant.file).write_text(mutant.text)
        kernels = Kernels(Simulator(checked=True, cache=Path(folder)), folder=sources)
        groups = dict.fromkeys(group for source in sources_with(mutant.file) for group in SUITE[source])
        for group in groups:
            for case in group():
                try:
                    case(kernels)
                except Exception as error:
                    return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return None


def run(chosen: list[Mutant], workers: int = 2) -> dict[Mutant, str | None]:
    """Every mutant and who noticed it."""
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(chosen, pool.map(notice, chosen), strict=True))


def sample(count: int, seed: int = 0) -> list[Mutant]:
    """A fixed sample of the mutants that change behaviour."""
    return random.Random(seed).sample([mutant for mutant in mutants() if mutant.known is None], count)


if __name__ == "__main__":
    everything = [mutant for mutant in mutants() if len(sys.argv) < 2 or mutant.file in sys.argv[1:]]
    changing = [mutant for mutant in everything if mutant.known is None]
    print(f"{len(everything)} mutants, {len(everything) - len(changing)} of them known to be equivalent")
    survivors = 0
    for mutant, noticed in run(changing).items():
        survivors += noticed is None
        print(f"{mutant.file}:{mutant.line}: {mutant.kind:18} {mutant.before[:90]:90} {noticed or 'NOT NOTICED'}", flush=True)
    print(f"noticed {len(changing) - survivors} of {len(changing)}")
