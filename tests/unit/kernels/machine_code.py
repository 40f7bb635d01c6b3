"""The machine code for sm_90a of the kernels by warpgroups, and of attention by 3xTF32: what it must be, in every form.

`python -m tests.unit.kernels.machine_code` compiles all of them by the oldest and the newest NVRTC here, those by 3xTF32 by the
newest (seven minutes on two cores), and prints a line for each, and a summary. Words behind it choose those whose lines have
all of them, as in `newest attention_hopper_backward 128`. The tests compile six.
"""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from mpitrain.kernels.source import package_sources
from mpitrain.ops.cuda.attention import HOPPER_LOOPS
from mpitrain.ops.cuda.tiles import HOPPER_TILES
from tests.unit.kernels.nvrtc import NEWEST, OLDEST, Compiler, usages
from tests.unit.kernels.sass import count, instructions, loops

REGISTERS = 168
"""Of each thread at the start: a third of a multiprocessor's for each warpgroup."""
VERSIONS = {"oldest": OLDEST, "newest": NEWEST}

# What layers ask of an epilogue.
BARE = {"BETA": 0, "BIAS": 0, "SAVED": 0, "RESIDUAL": 0, "ACTIVATION": 0, "SPLIT": 0, "ROW_SUMS": 0}
ASKED: dict[str, dict[str, Any]] = {
    "nothing": BARE,
    "bias, GELU, saved": BARE | {"BIAS": 1, "SAVED": 1, "ACTIVATION": 1},
    "bias, residual": BARE | {"BIAS": 1, "RESIDUAL": 1},
    "GELU backward": BARE | {"ACTIVATION": -1},
    "added to C": BARE | {"BETA": 1, "Result": "float"},
    "row sums": BARE | {"ROW_SUMS": 1, "Result": "float"},
    "row sums, added to C": BARE | {"BETA": 1, "ROW_SUMS": 1, "Result": "float"},
    "row sums, split": BARE | {"SPLIT": 1, "ROW_SUMS": 1, "Result": "float"},
}
STORED = {
    "NT": {"TRANSPOSED_A": 0, "TRANSPOSED_B": 1},
    "NN": {"TRANSPOSED_A": 0, "TRANSPOSED_B": 0},
    "TN": {"TRANSPOSED_A": 1, "TRANSPOSED_B": 0},
}
MOST = {1: 100, 2: 160}
"""Most instructions of each main loop of a product, by the times that a warpgroup has 64 rows.

For each there are four products in a depth of 16, of 64 to 96 cycles, and four more in the loop of blocks that sum rows, too.
"""

SEEN: dict[str, dict[str, Any]] = {
    "causal": {},
    "shared keys": {"GROUP": 4},
    "any": {"GENERAL": 1},
    "documents": {"DOCUMENTS": 1},
    "whole documents": {"DOCUMENTS": 2, "GENERAL": 1},
    "window": {"WINDOW": 1},
    "soft-cap": {"CAP": "50.0"},
    "a part's window and documents": {"WINDOW": 1, "DOCUMENTS": 1, "GENERAL": 1},
}
SEEN |= {
    f"soft-cap, {form}": SEEN["soft-cap"] | SEEN[form]
    for form in ("window", "whole documents", "a part's window and documents")
}
CAPPED = {"attention_hopper": 6 * 64, "attention_hopper_backward": 12 * 64}
"""More instructions of the main loop with a soft-cap: for each score a power and a division, in the backward also a slope."""
BOUNDED = 1100
"""The same of the backward, whose loop holds the masks, with documents and windows."""


class Job(NamedTuple):
    """A kernel to be compiled one way.

    name   the version of NVRTC, the kernel, and the way
    loops  of each main loop the products of a warpgroup, of 64 rows in a depth of 16 -> the most instructions
    """

    name: str
    version: str
    kernel: str
    macros: dict[str, Any]
    loops: dict[int, int]

    def __str__(self) -> str:
        return self.name


def products_in(version: str) -> Iterator[Job]:
    """Every tile and form, with what layers ask of that form; float16 once."""
    for tile in HOPPER_TILES:
        halves = tile.TILE_M // 128
        for form, stored in STORED.items():
            asked = [
                each for each in ASKED if (form == "TN") == ("sums" in each or each == "added to C")
            ]
            for each in dict.fromkeys([*asked, "nothing"]):
                elements = ["__nv_bfloat16"]
                if tile == HOPPER_TILES[0] and (form, each) == ("NT", "nothing"):
                    elements.append("__half")
                for element in elements:
                    dims = "x".join(map(str, tile))
                    name = f"{version} gemm_hopper {dims} {form} {element} {each}"
                    macros = {"Element": element, "Result": element, "Sum": "float"}
                    macros |= tile._asdict() | stored | ASKED[each]
                    products = (4 * halves, 8 * halves)[: 1 + macros["ROW_SUMS"]]
                    most = dict.fromkeys(products, MOST[halves])
                    yield Job(name, version, "gemm_hopper", macros, most)


def attentions_in(version: str) -> Iterator[Job]:
    """Every head and form; float16 once."""
    for (kernel, head), (products, most) in HOPPER_LOOPS.items():
        for form, seen in SEEN.items():
            elements = ["__nv_bfloat16"]
            if head == 64 and form == "causal":
                elements.append("__half")
            for element in elements:
                more = CAPPED[kernel] * ("CAP" in seen)
                if kernel == "attention_hopper_backward":
                    more += BOUNDED * len({"DOCUMENTS", "WINDOW", "GENERAL"} & {*seen})
                name = f"{version} {kernel} {head} {element} {form}"
                macros = {"Element": element, "Sum": "float", "HEAD": head} | seen
                yield Job(name, version, kernel, macros, {products: most + more})


def split_attentions() -> Iterator[Job]:
    """Attention in float32 with the widest heads, by three products of TF32, whose sums take half of the registers."""
    for kernel in ("attention_tensor", "attention_tensor_backward"):
        for form, seen in SEEN.items():
            macros = {"Element": "float", "Sum": "float", "HEAD": 128, "STEP": 16, "CHUNKED": 1}
            yield Job(f"newest {kernel} 128 float {form}", "newest", kernel, macros | seen, {})


def jobs(*words: str) -> list[Job]:
    """Those whose names have all the words."""
    everything = [*split_attentions()]
    for version in VERSIONS:
        everything += [*products_in(version), *attentions_in(version)]
    return [job for job in everything if {*words} <= {*job.name.replace(",", "").split()}]


def faults_of(job: Job) -> tuple[list[str], str]:
    """What is wrong with the machine code of a job, and the code in numbers."""
    done = Compiler(VERSIONS[job.version]).compile(
        package_sources()[job.kernel], "sm_90a", job.macros
    )
    if not job.loops:
        kernels = usages(done.log)
        spilled = [f"{name} spills" for name, used in kernels.items() if used.spilled]
        return spilled, ", ".join(f"{used.registers} registers" for used in kernels.values())
    used, code = usages(done.log)[job.kernel], instructions(done.code, job.kernel)
    bodies = [[code[i] for i in loop if not code[i].endswith(":")] for loop in loops(code)]
    found = {
        products: min((len(x) for x in bodies if count(x, "HGMMA") == products), default=0)
        for products in job.loops
    }
    said = {each: f"{length} instructions for {each} HGMMA" for each, length in found.items()}
    faults = [
        *(said[each] for each, most in job.loops.items() if not 0 < found[each] <= most),
        *(["HMMA or LDSM"] if count(code, "HMMA|LDSM") else []),
        *(["local memory"] if count(code, "LDL|STL") else []),
        *([f"{used.spilled} bytes spilled"] if used.spilled else []),
        *([f"{used.registers} registers"] if used.registers != REGISTERS else []),
        *(["USETMAXREG"] if count(code, "USETMAXREG") != 2 else []),
        *re.findall(r"C75\d\d[^\n]{,80}|[^\n]{,20}setmaxnreg[^\n]{,40}", done.log),
    ]
    registers = f"{used.registers} registers, {used.spilled} bytes spilled"
    return faults, f"{registers}, {' and '.join(said.values())}"


def main(words: list[str]) -> int:
    everything, wrong = jobs(*words), 0
    with ProcessPoolExecutor(2) as pool:
        done = zip(everything, pool.map(faults_of, everything), strict=True)
        for job, (faults, numbers) in done:
            wrong += bool(faults)
            print(f"{job}: {numbers}{' WRONG: ' * bool(faults)}{', '.join(faults)}", flush=True)
    print(f"{len(everything) - wrong} of {len(everything)} are as they must be")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and 1)
