"""Part of the GPU job: what ncu says of a product: time, share of peak, registers, blocks on a multiprocessor, stalls.

python3 jobs/gpu/profiles.py DEVICE           of the cube in bfloat16, in two tiles
python3 jobs/gpu/profiles.py DEVICE launch    what is profiled, each once
"""

import csv
import io
import shutil
import subprocess
import sys
from functools import partial

from table import emit, micro

METRICS = {
    "gpu__time_duration.sum": "seconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "launch__registers_per_thread": "registers",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor",
    "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio": "no_instruction",
    **{
        f"launch__occupancy_limit_{limit}": f"blocks by {limit}"
        for limit in ("blocks", "registers", "shared_mem", "warps")
    },
}
SECONDS = {
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
    "s": 1.0,
    "second": 1.0,
}
"""A second in units of ncu, old and new."""


def launch(kind: str) -> None:
    from workload import PRODUCTS

    from mpitrain.ops.cuda import product, tiles
    from mpitrain.ops.device import device_for
    from mpitrain.tools.bench.kernels import gemm

    device = device_for(kind)
    (shape, (form, *_)), *_ = PRODUCTS[kind]
    case = gemm.case_of(device, shape, "bfloat16", gemm.PRODUCTS[form])
    for tile in (tiles.TENSOR_TILES[5], tiles.TENSOR_TILES[0]):  # the largest, and a square one
        case.by(partial(product.gemm, tiling=tiles.Tiling(tile, 1)))()
    device.backend.synchronize()


def main(kind: str) -> None:
    """A result for each kernel that is launched."""
    if kind != "cuda" or not shutil.which("ncu"):
        emit(f"ncu: skipped, {'it is not installed' if kind == 'cuda' else 'there is no GPU here'}")
        return
    command = [
        *["ncu", "--clock-control", "none", "--csv", "--print-units", "base", "--metrics"],
        ",".join(METRICS),
        sys.executable,
        __file__,
        kind,
        "launch",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        text = child.stdout.read()
    print(text, flush=True)
    start = text.find('"ID"')
    if start < 0:
        emit(
            f"ncu: refused: {next((line for line in text.splitlines() if 'ERROR' in line), 'no profile')[:100]}"
        )
        return
    for name, numbers in profiles(text[start:]).items():
        emit(
            f"profile of {name[:60]}: {numbers.get('sm', 0):.0f}% of peak, memory {numbers.get('memory', 0):.0f}%, "
            f"L2 {numbers.get('l2', 0):.0f}%, "
            f"tensor cores {numbers.get('tensor', 0):.0f}%, {numbers.get('registers', 0):.0f} registers, "
            f"{numbers.get('occupancy', 0):.0f}% of warps, {blocks(numbers):.0f} blocks on a multiprocessor, "
            f"{numbers.get('no_instruction', 0):.2f} warps wait for instructions per issue",
            micro(numbers.get("seconds", 0)),
            **numbers,
        )


def blocks(numbers: dict[str, float]) -> float:
    """The blocks that a multiprocessor holds at once, by the tightest limit."""
    return min((most for name, most in numbers.items() if name.startswith("blocks by")), default=0)


def profiles(text: str) -> dict[str, dict[str, float]]:
    """The metrics of each launch, from ncu's CSV; a time in any unit becomes seconds.

    A metric that this GPU or this version of ncu lacks is `n/a`.
    """
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        if row.get("Metric Name") not in METRICS or row["Metric Value"] == "n/a":
            continue
        key, value = METRICS[row["Metric Name"]], float(row["Metric Value"].replace(",", ""))
        if key == "seconds":
            value *= SECONDS[row["Metric Unit"]]
        found.setdefault(f"{row['ID']} {row['Kernel Name']}", {})[key] = value
    return found


if __name__ == "__main__":
    if sys.argv[-1] == "launch":
        launch(sys.argv[1])
    else:
        main(sys.argv[1])
