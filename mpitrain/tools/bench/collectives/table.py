"""The table of collectives: its columns, and a footer with averages, ratios and warnings."""

from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median

from mpitrain.collectives.selection.own_algorithm import shown
from mpitrain.tools.bench.collectives.sweep import CollectiveRow
from mpitrain.tools.bench.turns import FAR
from mpitrain.tools.text_table import TextColumn, TextTable, figure, marked


def columns(places: Sequence[str], has_wires: bool = False) -> list[TextColumn]:
    """Return the columns of a table of collectives.

    places  requested classes of memory; with several, each row names its own
    """
    return [
        TextColumn("bytes", "12", "bytes"),
        TextColumn("count", "11", "count", importance=1),
        TextColumn("dtype", "8", "dtype", importance=2),
        TextColumn("algorithm", "<25", lambda row: _name(row, places), gap=2),
        TextColumn(
            "time", "11", lambda row: marked(figure(row.time_us), is_spoilt(row)), unit="us "
        ),
        TextColumn("min", "10", lambda row: figure(row.min_us), unit="us", importance=4),
        TextColumn(
            "p99",
            "11",
            lambda row: marked(figure(row.p99_us), is_spread(row)),
            unit="us ",
            importance=6,
        ),
        TextColumn("algbw", "8", lambda row: figure(row.algbw_GBs), unit="GB/s", importance=5),
        TextColumn("busbw", "8", lambda row: figure(row.busbw_GBs), unit="GB/s"),
        TextColumn(
            "predicted", "10", lambda row: figure(row.predicted_us), unit="us", importance=3
        ),
        TextColumn("error", "8.2e", "error", importance=5 if has_wires else 0),
        TextColumn("#wrong", "7", "wrong"),
    ]


def _name(row: CollectiveRow, places: Sequence[str]) -> str:
    """Return the first cell of a row: its algorithm, the choice of `auto`, and its class of memory.

    The class is left out if only one was requested.
    """
    # `chosen` of a file has its digest, too.
    chosen = shown(row.chosen)
    name = row.algorithm if chosen == row.algorithm else f"{row.algorithm}: {chosen}"
    return name if list(places) == [row.buffers] else f"{name}, {row.buffers}"


def is_spread(row: CollectiveRow) -> bool:
    """Return whether some runs took far longer than most. The median is still valid then."""
    return row.p99_us > FAR * row.time_us


def is_spoilt(row: CollectiveRow) -> bool:
    """Return whether most runs took far longer than the fastest, so that the median is invalid."""
    return row.time_us > FAR * row.min_us


def footer(rows: Sequence[CollectiveRow]) -> list[str]:
    """Return lines below a table: averages, ratios to MPI's own collective, warnings, wrong
    elements.
    """
    if not rows:
        return ["nothing was measured"]
    bandwidths: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        bandwidths.setdefault((row.algorithm, row.buffers), []).extend(
            [] if is_spoilt(row) else [row.busbw_GBs]
        )
    against = against_native(rows)
    table = TextTable(
        [
            TextColumn("algorithm", "<18", 0),
            TextColumn("buffers", "<7", 1),
            TextColumn("average busbw", "13", 2),
            TextColumn("times native's speed: mean, least" if against else "", "<", 3, gap=2),
        ]
    )
    lines = table.heading()
    for (algorithm, buffers), rates in bandwidths.items():
        average = f"{figure(sum(rates) / len(rates))} GB/s" if rates else "all marked ~"
        speed = ""
        if ratios := against.get((algorithm, buffers)):
            least = min(ratios, key=ratios.__getitem__)
            speed = f"{figure(geometric_mean(ratios.values()))}, {figure(ratios[least])} at {least} bytes"
        lines.append(table.line((algorithm, buffers, average, speed)))
    if spoilt := sum(map(is_spoilt, rows)):
        lines += [
            f"~ {spoilt} of {len(rows)} rows: median above {FAR:g} times the fastest run, so other work ran most of",
            "  the time; left out of averages and ratios. Measure again, with more --sweeps",
        ]
    if spread := sum(map(is_spread, rows)):
        lines += [
            f"~ {spread} of {len(rows)} rows: p99 above {FAR:g} times the median, so other work ran meanwhile;",
            "  the medians stand",
        ]
    return [*lines, *_wrong(rows)]


def _wrong(rows: Sequence[CollectiveRow]) -> list[str]:
    exact, lossy = (
        [row for row in rows if row.algorithm.startswith("wire ") == is_lossy]
        for is_lossy in (False, True)
    )
    lines = [f"wrong elements {sum(row.wrong for row in exact)}"] if exact else []
    return [*lines, f"replicas that differ {sum(row.wrong for row in lossy)}"] if lossy else lines


def against_native(rows: Iterable[CollectiveRow]) -> dict[tuple[str, str], dict[int, float]]:
    """Return {(algorithm, buffers): {bytes: time of MPI's own collective divided by its time}}.

    A time is the median of the sweeps. Spoilt rows are left out.
    """
    times: dict[tuple, list[float]] = {}
    for row in (row for row in rows if not is_spoilt(row)):
        times.setdefault((row.algorithm, row.buffers, row.bytes), []).append(row.time_us)
    ratios: dict[tuple[str, str], dict[int, float]] = {}
    for (algorithm, buffers, nbytes), own_times in times.items():
        native = times.get(("native", buffers, nbytes))
        if native and algorithm != "native":
            ratios.setdefault((algorithm, buffers), {})[nbytes] = median(native) / median(own_times)
    return ratios


def too_slow(rows: Sequence[CollectiveRow], least: float) -> list[str]:
    """Return a line for each algorithm with a bus bandwidth below `least` GB/s at the largest size.

    The bandwidth is the median of the sweeps. Spoilt rows are left out unless all are spoilt.
    """
    lines = []
    largest = max((row.bytes for row in rows), default=0)
    for algorithm, buffers in dict.fromkeys((row.algorithm, row.buffers) for row in rows):
        largest_rows = [
            row
            for row in rows
            if (row.algorithm, row.buffers, row.bytes) == (algorithm, buffers, largest)
        ]
        quiet = [row for row in largest_rows if not is_spoilt(row)]
        bandwidth = median(row.busbw_GBs for row in quiet or largest_rows)
        if not bandwidth >= least:
            lines.append(
                f"too slow: {algorithm} ({buffers}) has a bus bandwidth of {figure(bandwidth)} GB/s at {largest} bytes, "
                f"below {least:g}" + ("" if quiet else "; its median is marked ~, so measure again")
            )
    return lines
