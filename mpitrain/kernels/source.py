"""Kernel sources as text: with their own headers inserted, and with the signatures of their
kernels.

CuPy's cache of compiled kernels looks only at the text of the source. So this module inserts the
headers instead of the compiler: otherwise a changed header would go unnoticed.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import KernelError

FOLDER = Path(__file__).parent

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CLUSTER = r"(?:__cluster_dims__\((?P<cluster>[^),]*)[^)]*\)\s*)?"
_BOUND = r"(?:__launch_bounds__\((?P<bound>[^),]*)(?:,[^)]*)?\)\s*)?"
_KERNEL = re.compile(
    rf'extern "C" __global__ void {_CLUSTER}{_BOUND}(?P<name>\w+)\((?P<parameters>[^)]*)\)'
)
_PARAMETER = re.compile(
    r"(?P<const>const )?(?:__grid_constant__ )?(?P<type>[\w ]+?)\s*(?P<star>\*)?\s*(?:__restrict__ )?(?P<name>\w+)"
)


class KernelParameter(NamedTuple):
    """One parameter of a kernel: `const float* __restrict__ x` is Parameter("x", "float", True,
    True).
    """

    name: str
    type: str
    is_pointer: bool
    is_readonly: bool


class Signature(NamedTuple):
    """A kernel's name and parameters.

    bound    largest number of threads per block, as C++ text, or None
    cluster  number of blocks that run together, as C++ text, or None
    """

    name: str
    parameters: tuple[KernelParameter, ...]
    bound: str | None
    cluster: str | None = None


class SourceFile(NamedTuple):
    """A .cu file ready for a compiler, and the kernels in it by name."""

    path: Path
    text: str
    kernels: dict[str, Signature]


def _expand(path: Path, seen: set[Path]) -> str:
    """Return the file's text with its own headers inserted.

    Each header replaces its first #include; #line marks give compiler messages their file and line.
    A header that is not in the file's folder comes from the package's kernels.
    """
    if path in seen:
        return ""
    seen.add(path)
    text, parts, end = path.read_text(encoding="utf-8"), [f'#line 1 "{path.name}"\n'], 0
    for include in _INCLUDE.finditer(text):
        line = text.count("\n", 0, include.end()) + 2
        own = path.parent / include[1]
        header = _expand(own if own.exists() else FOLDER / include[1], seen)
        parts += [text[end : include.start()], header, f'\n#line {line} "{path.name}"']
        end = include.end()
    return "".join([*parts, text[end:]])


def _signature(match: re.Match[str]) -> Signature:
    parameters = []
    for text in filter(None, (part.strip() for part in match["parameters"].split(","))):
        part = _PARAMETER.fullmatch(" ".join(text.split()))
        if part is None:
            raise KernelError(
                f"{match['name']}: cannot read the parameter `{text}`.",
                "Write `type name`, `type* name` or `const type* __restrict__ name`.",
            )
        parameters.append(
            KernelParameter(part["name"], part["type"], bool(part["star"]), bool(part["const"]))
        )
    return Signature(match["name"], tuple(parameters), match["bound"], match["cluster"])


def read_source(path: Path) -> SourceFile:
    """Read a .cu file, and find its kernels.

    Every kernel is written `extern "C" __global__ void [__cluster_dims__(n, 1, 1)]
    [__launch_bounds__(n)] name(...)`.
    """
    text = _expand(path, set())
    kernels = [_signature(match) for match in _KERNEL.finditer(_COMMENT.sub("", text))]
    return SourceFile(path, text, {kernel.name: kernel for kernel in kernels})


@cache
def package_sources(folder: Path = FOLDER) -> dict[str, SourceFile]:
    return {path.stem: read_source(path) for path in sorted(folder.glob("*.cu"))}
