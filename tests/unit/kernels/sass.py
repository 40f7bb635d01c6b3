"""The instructions of a compiled kernel, read with NVIDIA's disassembler: a wheel, which needs neither a GPU nor a driver."""

import importlib.util
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path


def _disassembler() -> Path:
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(path for folder in folders for path in Path(folder).glob("cu*/bin/nvdisasm"))


@lru_cache(maxsize=1)
def _sections(cubin: bytes) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_disassembler(), "-c", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
    return re.split(r"^\s*\.section\s+", text, flags=re.MULTILINE)


def instructions(cubin: bytes, kernel: str) -> list[str]:
    """All instructions of a kernel of a cubin, in order, between its labels: `.L_x_1:`."""
    text = next(part for part in _sections(cubin) if part.startswith(f".text.{kernel},"))
    found = re.finditer(r"^\s*(?:(\.L_\w+:)|/\*[0-9a-f]+\*/\s+([^;]+);)", text, re.MULTILINE)
    return [
        label or instruction.strip() for label, instruction in (match.groups() for match in found)
    ]


def loops(code: list[str]) -> list[range]:
    """The places of every loop, from its label to a jump back to it."""
    labels = {line[:-1]: place for place, line in enumerate(code) if line.endswith(":")}
    found = []
    for place, line in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(\.L_\w+)", line)
        if jump and labels.get(jump[1], place) < place:
            found.append(range(labels[jump[1]], place + 1))
    return found


def main_loop(code: list[str], work: str) -> list[str]:
    """The innermost loop with most instructions whose name begins with `work`."""
    bodies = [[code[i] for i in loop if not code[i].endswith(":")] for loop in loops(code)]
    return max(bodies, key=lambda loop: (count(loop, work), -len(loop)))


def loops_beside_work(code: list[str], work: str) -> list[list[str]]:
    """The loops without such instructions inside of a loop that has some: the others wait for them."""
    found = loops(code)
    working = [loop for loop in found if count([code[i] for i in loop], work)]
    return [
        [code[i] for i in loop]
        for loop in found
        if loop not in working and any(loop[0] in other for other in working)
    ]


def count(code: list[str], work: str) -> int:
    """How many of the instructions have a name that begins with `work`."""
    return sum(re.match(rf"(?:@!?U?P\w+\s+)?{work}", line) is not None for line in code)
