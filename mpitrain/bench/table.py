"""What a benchmark prints and writes: a header, rows as they are measured, a footer with what to make of them."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from mpitrain.bench.sweep import Row
from mpitrain.errors import ConfigError

COLUMNS = (f"{'bytes':>12} {'count':>11} {'dtype':>8}  {'algorithm':<27} {'time':>10} {'min':>10} {'p99':>10} {'algbw':>8} "
           f"{'busbw':>8} {'predicted':>10} {'#wrong':>7}")
UNITS = f"{'':>12} {'':>11} {'':>8}  {'':<27} {'us':>10} {'us':>10} {'us':>10} {'GB/s':>8} {'GB/s':>8} {'us':>10} {'':>7}"


def line(row: Row, places: Sequence[str]) -> str:
    """One printed row; says where the buffers lie unless it is the one place asked for, and what auto has chosen."""
    name = row.algorithm if row.chosen == row.algorithm else f"{row.algorithm} ({row.chosen})"
    if list(places) != [row.buffers]:
        name += f" {row.buffers}"
    predicted = f"{row.predicted_us:10.1f}" if math.isfinite(row.predicted_us) else f"{'-':>10}"
    return (f"{row.bytes:12d} {row.count:11d} {row.dtype:>8}  {name:<27} {row.time_us:10.1f} {row.min_us:10.1f} "
            f"{row.p99_us:10.1f} {row.algbw_GBs:8.3f} {row.busbw_GBs:8.3f} {predicted} {row.wrong:7d}")


def footer(rows: Sequence[Row]) -> list[str]:
    """Average bus bandwidth, wrong elements, and every algorithm against MPI's own where that was measured."""
    if not rows:
        return ["nothing was measured"]
    lines = [f"average bus bandwidth {sum(row.busbw_GBs for row in rows) / len(rows):.3f} GB/s",
             f"wrong elements {sum(row.wrong for row in rows)}"]
    for (algorithm, buffers), ratios in against_native(rows).items():
        least = min(ratios, key=ratios.__getitem__)
        lines.append(f"{algorithm} ({buffers}) against native: {geometric_mean(ratios.values()):.2f} times as fast in the "
                     f"geometric mean of {len(ratios)} sizes, least {ratios[least]:.2f} at {least} bytes")
    return lines


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
        partial = path.with_name(path.name + ".part")
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", "Name a file in a folder that exists.") from None


def write_json(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Everything so far, as one whole file, a row per line: a reader never sees half a row. What is not finite is null."""
    listed = [json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                          for key, value in row._asdict().items()}, allow_nan=False) for row in rows]
    partial = path.with_name(path.name + ".part")
    partial.write_text(f'{{"header": {json.dumps(header)},\n"rows": [\n' + ",\n".join(listed) + "\n]}\n")
    os.replace(partial, path)
