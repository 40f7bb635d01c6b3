"""What a benchmark prints and writes: a header, rows as they are measured, a footer with what to make of them."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from mpitrain.bench.sweep import Row
from mpitrain.errors import ConfigError
from mpitrain.files import cannot_write, check_room, write_whole

COLUMNS = (f"{'bytes':>12} {'count':>11} {'dtype':>8}  {'algorithm':<26} {'time':>10} {'min':>10} {'p99':>11} {'algbw':>8} "
           f"{'busbw':>8} {'predicted':>10} {'error':>8} {'#wrong':>7}")
UNITS = f"{'':>12} {'':>11} {'':>8}  {'':<26} {'us':>10} {'us':>10} {'us':>11} {'GB/s':>8} {'GB/s':>8} {'us':>10} {'':>8} {'':>7}"

FAR = 2.0
"""Times the median beyond which a p99 is marked: other work ran beside the measurement, or the network was not quiet."""


def line(row: Row, places: Sequence[str]) -> str:
    """One printed row; says where the buffers lie unless it is the one place asked for, and what auto has chosen."""
    name = row.algorithm if row.chosen == row.algorithm else f"{row.algorithm}: {row.chosen}"
    if list(places) != [row.buffers]:
        name += f", {row.buffers}"
    predicted = f"{row.predicted_us:10.1f}" if math.isfinite(row.predicted_us) else f"{'-':>10}"
    error = f"{row.error:8.1e}" if math.isfinite(row.error) else f"{'-':>8}"
    return (f"{row.bytes:12d} {row.count:11d} {row.dtype:>8}  {name:<26} {row.time_us:10.1f} {row.min_us:10.1f} "
            f"{row.p99_us:10.1f}{'~' if is_spread(row) else ' '} {row.algbw_GBs:8.3f} {row.busbw_GBs:8.3f} {predicted} {error} "
            f"{row.wrong:7d}")


def is_spread(row: Row) -> bool:
    """Whether some runs took far longer than most."""
    return row.p99_us > FAR * row.time_us


def footer(rows: Sequence[Row]) -> list[str]:
    """Every algorithm's average bandwidth, and how it does against MPI's own where that was measured; what is wrong or odd."""
    if not rows:
        return ["nothing was measured"]
    bandwidths: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        bandwidths.setdefault((row.algorithm, row.buffers), []).append(row.busbw_GBs)
    against = against_native(rows)
    heading = "   against native, geometric mean and least" if against else ""
    lines = [f"{'algorithm':<18} {'buffers':<8} {'average busbw':>14}{heading}"]
    for (algorithm, buffers), found in bandwidths.items():
        lines.append(f"{algorithm:<18} {buffers:<8} {sum(found) / len(found):9.3f} GB/s")
        if ratios := against.get((algorithm, buffers)):
            least = min(ratios, key=ratios.__getitem__)
            lines[-1] += f"   {geometric_mean(ratios.values()):.2f} times as fast, {ratios[least]:.2f} at {least} bytes"
    if spread := sum(map(is_spread, rows)):
        lines.append(f"~ {spread} of {len(rows)} rows: p99 above {FAR:g} times the median, so other work ran meanwhile; "
                     "measure again, or with more --sweeps")
    return [*lines, *_wrong(rows)]


def _wrong(rows: Sequence[Row]) -> list[str]:
    """Wrong elements of exact operations, and of lossy ones the replicas that differ or are not finite."""
    exact, lossy = ([row for row in rows if row.algorithm.startswith("wire ") == is_lossy] for is_lossy in (False, True))
    lines = [f"wrong elements {sum(row.wrong for row in exact)}"] if exact else []
    return [*lines, f"replicas that differ {sum(row.wrong for row in lossy)}"] if lossy else lines


def against_native(rows: Iterable[Row]) -> dict[tuple[str, str], dict[int, float]]:
    """{(algorithm, buffers): {bytes: native's time over its time}}, each time the median of the sweeps."""
    times: dict[tuple, list[float]] = {}
    for row in rows:
        times.setdefault((row.algorithm, row.buffers, row.bytes), []).append(row.time_us)
    ratios: dict[tuple[str, str], dict[int, float]] = {}
    for (algorithm, buffers, nbytes), found in times.items():
        native = times.get(("native", buffers, nbytes))
        if native and algorithm != "native":
            ratios.setdefault((algorithm, buffers), {})[nbytes] = median(native) / median(found)
    return ratios


def check_writable(path: Path) -> None:
    """ConfigError unless a file can be written there: better before a measurement than after it."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a folder.", "Name a file.")
        if path.exists() and not path.is_file():  # root would put a file in the place of /dev/null
            raise ConfigError(f"{path} cannot be written: it is a device or a pipe, which a file would replace.", "Name a file.")
        check_room(path)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, header: dict[str, Any], rows: Sequence[Any]) -> None:
    """Everything so far, as one whole file, a row per line: a reader never sees half a row. What is not finite is null.

    rows  named tuples
    """
    listed = [json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                          for key, value in row._asdict().items()}, allow_nan=False) for row in rows]
    write_whole(path, f'{{"header": {json.dumps(header)},\n"rows": [\n' + ",\n".join(listed) + "\n]}\n")
