"""Count how plainly the project is written: words, sentences, fragments, circles and crowded folders.

Run `python jobs/reading/count.py` to print the numbers. With `--limits FILE` the exit code is 1 if any number is above its
limit in that JSON file; `--write FILE` writes the present numbers as limits. `--show` prints each sentence and word that
counts, with its file and line.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from text import Prose, prose

ROOT = Path(__file__).parents[2]
FORBIDDEN = (
    "what",
    "whoever",
    "nobody",
    "somebody",
    "likewise",
    "beside",
    "told",
    "asked",
    "kept",
    "carrier",
    "tenant",
    "tenants",
    "seat",
    "desk",
    "lane",
    "lanes",
    "guest",
    "guests",
    "door",
    "doors",
)
LONG = 20  # words of a sentence
# Verbs that a comment may have: a comment without one of these, or of a word that ends like one, is a fragment.
VERB = re.compile(
    r"\b(is|are|was|were|be|been|has|have|had|do|does|did|can|cannot|could|may|might|must|shall|should|will|would|needs?|"
    r"let|see|use|keep|set|add|take|make|give|run|hold|read|write|send|wait|avoid|ensure|skip|leave|call|raise|return|"
    r"[a-z]{3,}(?:s|ed|n't))\b",
    re.IGNORECASE,
)


def sentences(text: str) -> list[str]:
    """The sentences of a docstring: tables, lists of arguments, code and drawings are left out."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        if any(
            re.match(r"\s*\S+(, \S+)*  +\S|\s*(-{3,}|\.\. |>>>|\$ |\|)|    ", line)
            for line in lines
        ):
            continue
        blocks.append(" ".join(line.strip() for line in lines))
    return [part for block in blocks for part in re.split(r"(?<=[.!?])\s+", block) if part]


def circles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other, lazily or for type checkers too."""
    names = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }
    graph = {name: _imported(path, names) - {name, package.name} for name, path in names.items()}
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _imported(path: Path, names: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            candidates = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            candidates = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in candidates:
            while name and name not in names:
                name = name.rpartition(".")[0]
            found |= {name} if name else set()
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, rest = set[str](), [start]
    while rest:
        for name in graph[rest.pop()] - seen:
            seen.add(name)
            rest.append(name)
    return seen


def asserted_prose(tests: Path) -> Iterator[str]:
    """Yield the place of each sentence in `assert` and `match=`, outside the files of messages."""
    for path in tests.rglob("*.py"):
        if path.parent.name == "messages":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assert):
                checked: ast.AST = node.test
            elif isinstance(node, ast.keyword) and node.arg == "match":
                checked = node.value
            else:
                continue
            yield from (
                f"{path.relative_to(tests.parent)}:{inner.lineno} asserts {inner.value!r}"
                for inner in ast.walk(checked)
                if isinstance(inner, ast.Constant)
                and isinstance(inner.value, str)
                and _is_prose(inner.value)
            )


def _is_prose(text: str) -> bool:
    """Return whether a text has four words or more, and is no drawing of three lines."""
    words = [word for word in text.split() if re.fullmatch(r"[\W_]*[A-Za-z']{2,}[\W_]*", word)]
    return len(words) >= 4 and text.count("\n") < 3


def shown(package: Path) -> Iterator[str]:
    """Yield a line for each sentence that is too long, each fragment and each forbidden word."""
    forbidden = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
    for each in prose(package):
        where = f"{each.path.relative_to(package.parent)}:{each.line}"
        if each.kind == "comment" and not VERB.search(each.text):
            yield f"{where} fragment: {each.text}"
        for sentence in sentences(each.text):
            if len(sentence.split()) > LONG:
                yield f"{where} {len(sentence.split())} words: {sentence}"
        for found in forbidden.finditer(re.sub(r"`[^`]*`", "", each.text)):
            yield f"{where} {found[0]}"


def numbers() -> dict[str, int]:
    """Every count, by name."""
    package = ROOT / "mpitrain"
    texts: list[Prose] = list(prose(package))
    docstrings = [each.text for each in texts if each.kind == "docstring"]
    comments = [each.text for each in texts if each.kind == "comment"]
    words = Counter(
        word.lower()
        for each in texts
        for word in re.findall(r"[A-Za-z']+", re.sub(r"`[^`]*`", "", each.text))
    )
    folders = Counter(path.parent for path in package.rglob("*.py") if path.name != "__init__.py")
    return {
        "docstrings": len(docstrings),
        "docstrings with 'what'": sum(
            bool(re.search(r"\bwhat\b", text, re.IGNORECASE)) for text in docstrings
        ),
        "comments": len(comments),
        "comments that are fragments": sum(not VERB.search(text) for text in comments),
        f"sentences over {LONG} words": sum(
            len(part.split()) > LONG
            for text in (*docstrings, *comments)
            for part in sentences(text)
        ),
        "forbidden words": sum(words[word] for word in FORBIDDEN),
        "asserted prose in tests": len([*asserted_prose(ROOT / "tests")]),
        "circles of imports": len(circles(package)),
        "modules in the fullest folder": max(folders.values()),
    }


def main() -> int:
    """Print the counts; compare or write limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if options.show:
        print("\n".join([*shown(ROOT / "mpitrain"), *asserted_prose(ROOT / "tests")]))
    found = numbers()
    limits = json.loads(options.limits.read_text()) if options.limits else {}
    for name, number in found.items():
        limit = limits.get(name)
        print(f"{number:6}  {name}" + (f"  (limit {limit})" if limit is not None else ""))
    if options.write:
        options.write.write_text(
            json.dumps(
                {n: v for n, v in found.items() if n not in ("docstrings", "comments")}, indent=1
            )
            + "\n"
        )
    above = [name for name, limit in limits.items() if not found[name] <= limit]
    for name in above:
        print(f"{name}: {found[name]} is above the limit {limits[name]}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
