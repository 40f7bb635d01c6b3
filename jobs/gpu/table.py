"""One table out of what the tests and benchmarks of gpu-table.sh left: what, ours, the peer's, ratio, what it must be.

python jobs/gpu/table.py FOLDER DEVICE    the exit code is 1 if anything is wrong or missing or, on cuda, a ratio too low
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ELEMENTWISE = ("layer_norm", "layer_norm input", "cross_entropy_loss", "adamw", "square_sum", "column sums", "add_into",
               "to float16", "to int8", "from int8")


class Line(NamedTuple):
    """One comparison. The ratio is theirs over ours in time, or ours over theirs in rate: above 1 is faster than the peer."""

    what: str
    ours: str
    peer: str
    ratio: float | None = None
    required: float | None = None
    ok: bool = True


def micro(value: float) -> str:
    """Microseconds for a table."""
    return f"{value:,.1f} us"


def failed(folder: Path, name: str, what: str) -> Line:
    """A measurement that left no file: its error, or its last word."""
    log = folder / f"{name}.log"
    said = [line for line in log.read_text().splitlines() if line.strip()] if log.exists() else []
    word = next((line for line in said if "Error" in line), said[-1] if said else "was not run")
    return Line(f"{what}: {word[:110]}", "-", "-", ok=False)


def read(folder: Path, name: str) -> Any:
    """What a measurement left, or None."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() and path.stat().st_size else None


def compared(what: str, ours: float, peer: float, required: float | None, wrong: int) -> Line:
    """A line of times in microseconds."""
    return Line(what + f", {wrong} wrong" * bool(wrong), micro(ours), micro(peer), peer / ours, required, wrong == 0)


def tests(folder: Path, device: str) -> Iterator[Line]:
    """The gpu-marked tests; without a GPU they are all skipped, and with one some must have run."""
    said = [line.strip("= ") for line in (folder / "tests.log").read_text().splitlines()]
    summary = next((line for line in reversed(said) if re.fullmatch(r"(\d+ \w+(, )?)+ in .*", line)), "no summary")
    counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", summary.partition(" in ")[0])}
    has_run = counts.get("passed", 0) > 0 or (device != "cuda" and bool(counts))
    yield Line(f"tests marked gpu: {summary}", "-", "-", ok=has_run and not {"failed", "error"} & counts.keys())


def products(folder: Path) -> Iterator[Line]:
    """Matrix products against the library's."""
    found = read(folder, "gemm")
    if not found:
        yield failed(folder, "gemm", "products")
        return
    required = {("float32", False): 0.9, ("bfloat16", False): 0.7, ("float32", True): 1.0, ("bfloat16", True): 1.0}
    for row in found["rows"]:
        is_fused = "+" in row["product"]
        extra = {"NT+gelu": " + bias + GELU, against library and a kernel",
                 "TN+sums": " + bias gradient, against library and kernels"}.get(row["product"], " against library")
        yield compared(f"{row['product'][:2]} {row['m']}x{row['n']}x{row['k']} {row['dtype']}{extra}",
                       row["time_us"], row["library_us"], required[row["dtype"], is_fused], row["wrong"])


def kernels(folder: Path) -> Iterator[Line]:
    """Element-wise kernels and reductions against a copy; attention against PyTorch's."""
    found = read(folder, "kernels")
    if not found:
        yield failed(folder, "kernels", "kernels")
        return
    rows = {row["name"]: row for row in found["rows"]}
    copy = rows["copy"]["rate"]
    for name in ELEMENTWISE:
        if row := rows.get(name):
            yield Line(f"{name} against a copy" + f", {row['wrong']} wrong" * bool(row["wrong"]), f"{row['rate']:,.1f} GB/s",
                       f"{copy:,.1f} GB/s", row["rate"] / copy, 0.85, row["wrong"] == 0)
    for row in found["rows"]:
        if row["name"].startswith("attention"):
            what = f"{row['name']} against scaled_dot_product_attention"
            if row["peer_us"] is None:
                yield Line(f"{what}: PyTorch was not asked", micro(row["time_us"]), "-", ok=row["wrong"] == 0)
            else:
                yield compared(what, row["time_us"], row["peer_us"], 0.5, row["wrong"])


def training(folder: Path) -> Iterator[Line]:
    """A whole training step against PyTorch eager."""
    for name, who in (("train", "our kernels"), ("train-library", "the library")):
        found = read(folder, name)
        if not found:
            yield failed(folder, name, f"training step, products by {who}")
            continue
        (ours, *peers), what = found["sides"], f"training step of a GPT, float32, products by {who}"
        if not peers:
            yield Line(f"{what}: PyTorch was not asked", micro(1e6 * median(ours["blocks"])), "-")
            continue
        apart = max(abs(a - b) for a, b in zip(ours["losses"], peers[0]["losses"], strict=True))
        times = [1e6 * median(side["blocks"]) for side in (ours, peers[0])]
        yield compared(f"{what}, losses {apart:.0e} apart", *times, None, 0)._replace(ok=apart <= 1e-2)


def rings(folder: Path) -> Iterator[Line]:
    """A ring all-reduce between ranks on one device, through pointers and through staging."""
    for aware in ("yes", "no"):
        found, what = read(folder, f"ring-{aware}"), f"ring all-reduce of 2 ranks, device.cuda_aware = {aware}"
        if found is None:
            yield failed(folder, f"ring-{aware}", what)
        elif "refused" in found:
            yield Line(f"{what}: {found['refused']}", "-", "-")
        else:
            bus = 2 * (found["ranks"] - 1) / found["ranks"] * found["bytes"] / found["seconds"] / 1e9
            yield Line(f"{what}, {found['bytes']:,} bytes, {bus:.2f} GB/s bus bandwidth, {found['wrong']} wrong",
                       micro(1e6 * found["seconds"]), "-", ok=found["wrong"] == 0)


def main(folder: Path, device: str) -> int:
    """Print the table; the exit code."""
    lines = [*tests(folder, device), *(line for part in (products, kernels, training, rings) for line in part(folder))]
    lines += [failed(folder, name, f"{name} ended early") for name in ("gemm", "kernels")
              if (folder / f"{name}.failed").exists() and (found := read(folder, name))
              and not any(row["wrong"] for row in found["rows"])]    # which fails as well, and is said in their lines
    if device != "cuda":    # there times say nothing about a GPU
        lines = [line._replace(required=None) for line in lines]
    width = max(len(line.what) for line in lines)
    print(f"{'what':<{width}}  {'ours':>14} {'peer':>14} {'ratio':>7} {'required':>8}")
    missed = 0
    for line in lines:
        short = line.required is not None and not (line.ratio is not None and line.ratio >= line.required)
        missed += short or not line.ok
        ratio, required = ("-" if number is None else f"{number:.2f}" for number in (line.ratio, line.required))
        print(f"{line.what:<{width}}  {line.ours:>14} {line.peer:>14} {ratio:>7} {required:>8}"
              + ("  failed" if not line.ok else "  short" if short else ""))
    print(f"{len(lines)} lines, {missed} of them short of what is required, or failed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
