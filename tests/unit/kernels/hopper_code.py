"""The machine code of gemm_hopper.cu for sm_90a: what it must be, in every form.

`python -m tests.unit.kernels.hopper_code` compiles all variants by the oldest and the newest NVRTC here (three minutes on two
cores), and prints a line for each, and a summary; with `oldest` or `newest` behind it by one of them. The tests compile three.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from mpitrain.kernels.source import package_sources
from mpitrain.ops.cuda.tiles import HOPPER_TILES, HopperTile
from tests.unit.kernels.nvrtc import NEWEST, OLDEST, Compiler, usages
from tests.unit.kernels.sass import count, instructions, loops

KERNEL = "gemm_hopper"
REGISTERS = 168
"""Of each thread at the start: a third of a multiprocessor's for each warpgroup."""
MOST = {1: 100, 2: 160}
"""Most instructions of a main loop, by the products of 64 rows in a depth of 16. Tensor cores take 64 to 96 cycles for each."""

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
FORMS = {
    "NT": {"TRANSPOSED_A": 0, "TRANSPOSED_B": 1},
    "NN": {"TRANSPOSED_A": 0, "TRANSPOSED_B": 0},
    "TN": {"TRANSPOSED_A": 1, "TRANSPOSED_B": 0},
}
VERSIONS = {"oldest": OLDEST, "newest": NEWEST}


class Variant(NamedTuple):
    """One way to compile the kernel: keys of VERSIONS, FORMS and ASKED."""

    version: str
    tile: HopperTile
    form: str
    asked: str
    element: str = "__nv_bfloat16"


def variants(versions: Iterable[str]) -> Iterator[Variant]:
    """Every tile and form, with what layers ask of that form; float16 once."""
    for version in versions:
        for tile in HOPPER_TILES:
            for form in FORMS:
                for asked in ASKED:
                    if (form == "TN") == ("sums" in asked or asked == "added to C"):
                        yield Variant(version, tile, form, asked)
                yield Variant(version, tile, form, "nothing")
        yield Variant(version, HOPPER_TILES[0], "NT", "nothing", "__half")


def faults_of(variant: Variant) -> tuple[list[str], str]:
    """What is wrong with the machine code of a variant, and the code in numbers."""
    version, tile, form, asked, element = variant
    macros = {"Element": element, "Result": element, "Sum": "float"}
    macros |= tile._asdict() | FORMS[form] | ASKED[asked]
    done = Compiler(VERSIONS[version]).compile(package_sources()[KERNEL], "sm_90a", macros)
    used, code = usages(done.log)[KERNEL], instructions(done.code, KERNEL)
    bodies = [[code[i] for i in loop if not code[i].endswith(":")] for loop in loops(code)]
    working = [body for body in bodies if count(body, "HGMMA")]
    shortest = min(map(len, working), default=0)
    # The loop over tiles holds the main loops, one of them with row sums.
    main = [body for body in working if len(body) <= MOST[2]]
    halves = tile.TILE_M // 128
    faults = [
        *(["no HGMMA"] if not main else []),
        *(["HMMA or LDSM"] if count(code, "HMMA|LDSM") else []),
        *(["local memory"] if count(code, "LDL|STL") else []),
        *([f"{used.registers} registers"] if used.registers != REGISTERS else []),
        *([f"{shortest} instructions in the main loop"] if shortest > MOST[halves] else []),
        *([f"{used.spilled} bytes spilled"] if used.spilled else []),
        *(["USETMAXREG"] if count(code, "USETMAXREG") != 2 else []),
        *re.findall(r"C75\d\d[^\n]{,80}|[^\n]{,20}setmaxnreg[^\n]{,40}", done.log),
    ]
    in_loops = " and ".join(f"{len(body)} for {count(body, 'HGMMA')} HGMMA" for body in main)
    return faults, f"{used.registers} registers, {used.spilled} bytes spilled, loops of {in_loops}"


def main(versions: list[str]) -> int:
    everything = list(dict.fromkeys(variants(versions or VERSIONS)))
    wrong = 0
    with ProcessPoolExecutor(2) as pool:
        for variant, (faults, numbers) in zip(
            everything, pool.map(faults_of, everything), strict=True
        ):
            wrong += bool(faults)
            tile = "x".join(map(str, variant.tile))
            name = f"{variant.version} {tile} {variant.form} {variant.element} {variant.asked}"
            print(f"{name}: {numbers}{' WRONG: ' * bool(faults)}{', '.join(faults)}", flush=True)
    print(f"{len(everything) - wrong} of {len(everything)} variants are as they must be")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) and 1)
