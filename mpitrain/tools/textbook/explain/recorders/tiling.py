"""The topic of tiling: the ladder of products, with the transactions that the simulator counts."""

from mpitrain.tools.textbook.explain.explanation import (
    ROOT,
    Columns,
    CountedFormula,
    Explanation,
    Frame,
    SourceLines,
    Text,
    sentence,
)
from mpitrain.tools.textbook.explain.topic import TopicSetting
from mpitrain.tools.textbook.ladder.rungs import FOLDER, RUNGS, Climbed, ProductShape, Rung, climb

SHAPE = ProductShape(128, 128, 32)
"""The product that each kernel of the ladder computes: small, but with several tiles per dim of C."""
LABELS = {
    "naive": sentence("naive"),
    "coalesced": sentence("coalesced"),
    "shared": sentence("shared tiles"),
    "registers": sentence("register tiles"),
    "tensor": sentence("tensor cores"),
}
TITLE: Text = sentence(
    "Tiling: a matrix product reads global memory less with each rung of a ladder"
)
COLUMNS = (
    Columns(sentence("a block: its tile of C, and the operands it reads"), ("C", "A", "B")),
    Columns(sentence("reads of each element"), ("A", "B")),
    Columns(sentence("sectors of 32 bytes"), ("A", "B", "C")),
    Columns(sentence("shared memory"), ("passes", "conflicts")),
)


def record(name: str, setting: TopicSetting) -> Explanation:
    """Run the ladder in the simulator; a frame for each rung."""
    ladder = climb(SHAPE)
    cells: list[tuple[str, ...]] = [("",) * 10] * len(RUNGS)
    frames = [Frame(sentence("start"), tuple(cells))]
    for at, (rung, climbed) in enumerate(ladder.items()):
        cells[at] = _cells(RUNGS[rung], climbed)
        frames.append(
            Frame(sentence("rung {k}: {rung}", k=at + 1, rung=LABELS[rung]), tuple(cells))
        )
    return Explanation(
        name,
        TITLE,
        [
            sentence("A warp of 32 threads reads global memory in sectors of 32 bytes."),
            sentence("Naive: 32 threads read a column of A, so each word needs its own sector."),
            sentence("Coalesced: they read neighbours in B, so every byte of a sector is used."),
            sentence(
                "Shared tiles: a block loads a tile once, and its threads share each element."
            ),
            sentence(
                "Register tiles: a thread computes 16 elements, so a tile is four times as wide and high."
            ),
            sentence(
                "Tensor cores: 16-bit elements need half the sectors, and a warp multiplies fragments."
            ),
        ],
        sentence(
            "C = A B with M, N, K = {m}, {n}, {k}. Sectors are those of all requests, without caches. "
            "Passes are over the 32 banks; conflicts are passes added by equal banks.",
            m=SHAPE.M,
            n=SHAPE.N,
            k=SHAPE.K,
        ),
        [LABELS[rung] for rung in RUNGS],
        COLUMNS,
        frames,
        [_formula(rung, ladder[rung]) for rung in RUNGS],
        [_source(rung) for rung in RUNGS],
        "mpitrain bench transactions --dtype float32",
        ("tests/unit/textbook/test_ladder.py", "tests/unit/kernels/test_transactions.py"),
        (len(RUNGS),),
    )


def _cells(rung: Rung, climbed: Climbed) -> tuple[str, ...]:
    (rows, columns), sectors = rung.tile, climbed.traffic.sectors
    return (
        f"{rows}x{columns}",
        f"{rows}x{SHAPE.K}",
        f"{SHAPE.K}x{columns}",
        *(f"{climbed.reads(operand):g}" for operand in "AB"),
        *(f"{sectors[operand]:,}" for operand in "ABC"),
        f"{climbed.passes:,}",
        f"{climbed.conflicts:,}",
    )


def _formula(name: str, climbed: Climbed) -> CountedFormula:
    rung = RUNGS[name]
    return CountedFormula(
        sentence("sectors of A and B, {rung}", rung=LABELS[name]),
        climbed.sectors,
        " + ".join(rung.words),
        sum(rung.sectors(SHAPE)),
    )


def _source(name: str) -> SourceLines:
    file = FOLDER / f"{name}.cu"
    lines = file.read_text(encoding="utf-8").splitlines()
    first = next(
        at for at, line in enumerate(lines, 1) if f"void {name}(" in line or f") {name}(" in line
    )
    return SourceLines(name, file.relative_to(ROOT).as_posix(), first)
