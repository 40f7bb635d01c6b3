"""Removes the checks of the readers one at a time, and asks whether a damaged file notices.

`python -m tests.unit.readers.reader_mutants [reader ...]` says of each removed check whether a test
turned red; some minutes on two cores.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = {
    "manifests": ("run/checkpoint/manifest.py",),
    "headers": ("formats/safetensors_files.py", "run/checkpoint/loading.py"),
    "tuning": ("collectives/selection/tuning.py", "strict_json.py"),
    "tiles": ("ops/cuda/tiles.py",),
    "trace": ("trace/timeline.py", "tools/report/schedule_comparison.py"),
    "metrics": ("run/metrics.py", "tools/bench/plot_loss.py"),
    "file_of_tokens": ("data/token_files.py",),
    "conversations": ("data/instructions.py", "strict_json.py"),
    "images": ("data/samples.py",),
}
LIMITS = {
    *("ge", "gt", "le", "lt", "pattern", "min_length", "max_length", "strict", "extra"),
    *("allow_inf_nan", "object_pairs_hook", "parse_constant", "parse_float"),
}


def mutants(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, what is removed, and the source without it."""
    count = sum(1 for _ in ast.walk(ast.parse(text)))
    for number in range(count):
        tree = ast.parse(text)
        node = list(ast.walk(tree))[number]
        for what in _removed(node):
            yield getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(tree))
            tree = ast.parse(text)
            node = list(ast.walk(tree))[number]


def _removed(node: ast.AST) -> Iterator[str]:
    """Take one check at a time away from a node; after each the node is used up."""
    if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise | ast.Break):
        operands = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        if len(operands) == 1 or isinstance(node.test.op, ast.And):
            said, node.test = ast.unparse(node.test), ast.Constant(False)
            yield f"if {said}"
        else:
            at = node._at = getattr(node, "_at", 0)
            said = ast.unparse(operands.pop(at))
            yield f"... or {said}"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitAnd):
        said, node.value = ast.unparse(node), node.target
        node.value = ast.Constant(True)
        yield said
    if isinstance(node, ast.Call | ast.Dict):
        for keyword in [
            one
            for one in getattr(node, "keywords", ())
            if one.arg in LIMITS and ast.unparse(node.func) != "zip"
        ]:
            node.keywords.remove(keyword)
            yield f"{ast.unparse(keyword)} of {ast.unparse(node.func)}"
            return


def notices(source: str, text: str, reader: str) -> bool:
    """Whether a case of the reader turns red with this text as the source."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("mpitrain", "tests"):
            shutil.copytree(
                ROOT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        (Path(folder) / "mpitrain" / source).write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/unit/readers", "-k", reader]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": folder}, capture_output=True
        )
    return done.returncode == 1


def main(readers: list[str]) -> None:
    for reader in readers or SOURCES:
        for source in SOURCES[reader]:
            for line, what, text in mutants((ROOT / "mpitrain" / source).read_text()):
                said = "noticed" if notices(source, text, reader) else "NOT noticed"
                print(f"{reader}: {source}:{line}: without {what}: {said}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
