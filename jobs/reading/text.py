"""The prose of Python files: docstrings, attribute docstrings and comments, each with its place."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CODE = re.compile(r"#\s*(noqa|type:|fmt:|pragma|!)")


class Prose(NamedTuple):
    """A docstring or a block of comment lines.

    kind  "docstring" or "comment"
    """

    path: Path
    line: int
    kind: str
    text: str


def prose(root: Path) -> Iterator[Prose]:
    """All docstrings and comments below `root`, file by file."""
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        yield from _docstrings(path, ast.parse(source))
        yield from _comments(path, source)


def _docstrings(path: Path, tree: ast.AST) -> Iterator[Prose]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield Prose(path, getattr(node, "lineno", 1), "docstring", text)
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _constant(after)):
                    yield Prose(path, after.lineno, "docstring", text)


def _constant(node: ast.stmt) -> str:
    """The text of a statement that is nothing but a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value if isinstance(node.value.value, str) else ""
    return ""


def _comments(path: Path, source: str) -> Iterator[Prose]:
    """Comments; whole lines that follow each other are one."""
    start, end, block = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or CODE.match(token.string):
            continue
        (line, column), text = token.start, token.string.lstrip("# ")
        is_whole = not token.line[:column].strip()
        if block and is_whole and line == end + 1:
            block.append(text)
        else:
            if block:
                yield Prose(path, start, "comment", " ".join(block))
            start, block = line, [text]
        end = line if is_whole else -1
    if block:
        yield Prose(path, start, "comment", " ".join(block))
