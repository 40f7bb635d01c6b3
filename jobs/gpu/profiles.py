"""Part of the second GPU job: what ncu says of each kernel: time, share of peak, registers, occupancy.

python3 jobs/gpu/profiles.py DEVICE           a result for each kernel
python3 jobs/gpu/profiles.py DEVICE launch    what is profiled: every product and every operation of a step, once
"""

import csv
import io
import shutil
import subprocess
import sys

from result import emit, micro

METRICS = {
    "gpu__time_duration.sum": "seconds",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "launch__registers_per_thread": "registers",
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

SIZES = {"cuda": (8, 1024, 768, 12, 50257)}


def launch(kind: str) -> None:
    """Everything once."""
    from workload import FORMS, PRODUCTS

    from mpitrain.bench.kernels import gemm
    from mpitrain.bench.kernels import operations as bench
    from mpitrain.ops.device import device_for

    device = device_for(kind)
    for shape, _ in PRODUCTS[kind][:3]:
        for dtype in ("float32", "bfloat16"):
            for name in FORMS:
                gemm.case_of(device, shape, dtype, gemm.PRODUCTS[name]).by(device.multiply)()
    bench.SHAPES |= SIZES
    bench.MOVED["cuda"] = 1 << 15
    for work in bench.works(device, None):
        work.run()
    device.backend.synchronize()


def main(kind: str) -> None:
    """A result for each kernel of ours."""
    if kind != "cuda" or not shutil.which("ncu"):
        emit(f"ncu: skipped, {'it is not installed' if kind == 'cuda' else 'there is no GPU here'}")
        return
    words = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--print-units",
        "base",
        "--metrics",
        ",".join(METRICS),
        sys.executable,
        __file__,
        kind,
        "launch",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
            f"{numbers.get('registers', 0):.0f} registers, {numbers.get('occupancy', 0):.0f}% of warps",
            micro(numbers.get("seconds", 0)),
            **numbers,
        )


def profiles(text: str) -> dict[str, dict[str, float]]:
    """The metrics of each launch, from ncu's CSV; a time in any unit becomes seconds."""
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        if row.get("Metric Name") not in METRICS:
            continue
        key, value = METRICS[row["Metric Name"]], float(row["Metric Value"].replace(",", ""))
        if key == "seconds":
            value *= SECONDS[row["Metric Unit"]]
        found.setdefault(f"{row['ID']} {row['Kernel Name']}", {})[key] = value
    return found


if __name__ == "__main__":
    (launch if sys.argv[2:] == ["launch"] else main)(sys.argv[1])
