"""The machine code of attention by warpgroups for sm_90a: what it must be, in every form.

`python -m tests.unit.kernels.attention_code` compiles all forms by the oldest and the newest NVRTC here (two minutes on two
cores), and prints a line for each; with `oldest` or `newest` behind it by one of them. A test compiles three.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from mpitrain.kernels.source import package_sources
from tests.unit.kernels.hopper_code import REGISTERS, VERSIONS
from tests.unit.kernels.nvrtc import Compiler, usages
from tests.unit.kernels.sass import count, instructions, loops

LOOPS = {
    ("attention_hopper", 64): (12, 440),
    ("attention_hopper", 128): (16, 500),
    ("attention_hopper_backward", 64): (36, 1180),
    ("attention_hopper_backward", 128): (32, 900),
}
"""(kernel, channels of a head) -> the products of the main loop, of 64 rows in a depth of 16, and most instructions."""
CAPPED = {"attention_hopper": 6 * 64, "attention_hopper_backward": 12 * 64}
"""More instructions of the main loop with a soft-cap: for each score a power and a division, in the backward also a slope."""
BOUNDED = 1100
"""The same of the backward, whose loop holds the masks, with documents and windows."""
FORMS = {
    "causal": {},
    "shared keys": {"GROUP": 4},
    "any": {"GENERAL": 1},
    "documents": {"DOCUMENTS": 1},
    "whole documents": {"DOCUMENTS": 2, "GENERAL": 1},
    "window": {"WINDOW": 1},
    "soft-cap": {"CAP": "50.0"},
    "a part's window and documents": {"WINDOW": 1, "DOCUMENTS": 1, "GENERAL": 1},
}


FORMS |= {
    f"soft-cap, {form}": FORMS["soft-cap"] | FORMS[form]
    for form in ("window", "whole documents", "a part's window and documents")
}


class Variant(NamedTuple):
    """One way to compile the kernel: keys of VERSIONS and FORMS."""

    version: str
    kernel: str
    head: int
    form: str
    element: str = "__nv_bfloat16"


def variants(versions: Iterable[str]) -> Iterator[Variant]:
    for version in versions:
        for kernel, head in LOOPS:
            for form in FORMS:
                yield Variant(version, kernel, head, form)
        for kernel in ("attention_hopper", "attention_hopper_backward"):
            yield Variant(version, kernel, 64, "causal", "__half")


def faults_of(variant: Variant) -> tuple[list[str], str]:
    """What is wrong with the machine code of a variant, and the code in numbers."""
    version, kernel, head, form, element = variant
    macros = {"Element": element, "Sum": "float", "HEAD": head} | FORMS[form]
    done = Compiler(VERSIONS[version]).compile(package_sources()[kernel], "sm_90a", macros)
    used, code = usages(done.log)[kernel], instructions(done.code, kernel)
    bodies = [[code[i] for i in loop if not code[i].endswith(":")] for loop in loops(code)]
    products, most = LOOPS[kernel, head]
    most += CAPPED[kernel] * ("CAP" in macros)
    if kernel == "attention_hopper_backward":
        most += BOUNDED * len({"DOCUMENTS", "WINDOW", "GENERAL"} & {*macros})
    main = min((x for x in bodies if count(x, "HGMMA") == products), key=len, default=[])
    faults = [
        *([] if main else [f"no loop with {products} HGMMA"]),
        *(["HMMA or LDSM"] if count(code, "HMMA|LDSM") else []),
        *(["local memory in the main loop"] if count(main, "LDL|STL") else []),
        *([f"{used.spilled} bytes spilled"] if used.spilled else []),
        *([f"{used.registers} registers"] if used.registers != REGISTERS else []),
        *([f"{len(main)} instructions in the main loop"] if len(main) > most else []),
        *(["USETMAXREG"] if count(code, "USETMAXREG") != 2 else []),
        *re.findall(r"C75\d\d[^\n]{,80}|[^\n]{,20}setmaxnreg[^\n]{,40}", done.log),
    ]
    return (
        faults,
        f"{used.registers} registers, {used.spilled} bytes spilled, {len(main)} instructions for {count(main, 'HGMMA')} HGMMA",
    )


def main(versions: list[str]) -> int:
    everything = list(variants(versions or VERSIONS))
    wrong = 0
    with ProcessPoolExecutor(2) as pool:
        done = zip(everything, pool.map(faults_of, everything), strict=True)
        for variant, (faults, numbers) in done:
            wrong += bool(faults)
            name = " ".join(map(str, variant))
            print(f"{name}: {numbers}{' WRONG: ' * bool(faults)}{', '.join(faults)}", flush=True)
    print(f"{len(everything) - wrong} of {len(everything)} variants are as they must be")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and 1)
