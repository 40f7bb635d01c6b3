"""Comparison of a benchmark with an earlier one, which is read from the JSON file of its --json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.files import reading_of, text_of
from mpitrain.strict_json import parsed
from mpitrain.tools.text_table import figure

KEYS = (
    *("op", "algorithm", "buffers", "bytes", "dtype", "ranks", "ways", "pairs", "window"),
    *("first", "second", "product", "m", "n", "k", "name"),
)
"""Fields that identify a row. Rows of one benchmark that agree in them are repetitions."""
SAME = ("op", "ranks", "device")
"""Facts of the header that must be the same in both benchmarks."""
TIMES = (("min_us", "time_us"), ("fastest_us", "latency_us"))
RATES = (("best_GBs", "bandwidth_GBs"),)
"""Compared fields. Of each group the first counts that a row has: the fastest run has least noise."""


class Ratio(NamedTuple):
    """One measured value of one row, in the earlier benchmark and now.

    row     identity of the row in words, such as its algorithm and bytes
    field   name of the value
    before  the value in the earlier file
    now     the value now
    slower  how many times slower it is now; below 1 if it is faster
    """

    row: str
    field: str
    before: float
    now: float
    slower: float


class Before(NamedTuple):
    """An earlier benchmark, read from its JSON file.

    header  facts about its machine and operation
    values  {identity of a row: {name of a value: its best measurement}}
    """

    header: dict[str, Any]
    values: dict[tuple, dict[str, float]]


def read_before(path: Path, facts: Mapping[str, Any]) -> Before:
    """Read the JSON file of an earlier benchmark.

    facts   header of the present benchmark
    raises  ConfigError if the file is no benchmark, or one of another operation, number of ranks or
            device
    """
    law = f"--against names a file of `mpitrain bench ... --json`, but {path}"
    way_out = "Name the file of the same benchmark on the same number of ranks."
    with reading_of(law, way_out):
        data = text_of(path)
    try:
        document = parsed(data)
    except ValueError as error:
        raise ConfigError(f"{law} is not JSON: {error}.", way_out) from None
    header = document.get("header") if isinstance(document, dict) else None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(header, dict) or not isinstance(rows, list):
        raise ConfigError(f"{law} has no header or no rows.", way_out)
    for name in SAME:
        if name in header and name in facts and header[name] != facts[name]:
            raise ConfigError(
                f"{law} has {name} {header[name]!r}, and this benchmark {facts[name]!r}.", way_out
            )
    values = best_values([row for row in rows if isinstance(row, dict)])
    if not values:
        raise ConfigError(f"{law} has no measured row.", way_out)
    return Before(header, values)


def best_values(rows: Sequence[Mapping[str, Any]]) -> dict[tuple, dict[str, float]]:
    """Return {identity of a row: {name of a value: its best measurement}}.

    Values that are not positive numbers are left out.
    """
    best: dict[tuple, dict[str, float]] = {}
    for row in rows:
        identity = tuple((key, row[key]) for key in KEYS if isinstance(row.get(key), str | int))
        for group, pick in ((TIMES, min), (RATES, max)):
            for fields in group:
                field = next((name for name in fields if _is_measured(row.get(name))), None)
                if field and identity:
                    values = best.setdefault(identity, {})
                    values[field] = pick(values.get(field, row[field]), row[field])
    return best


def _is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def ratios(before: Before, rows: Sequence[Any]) -> list[Ratio]:
    """Compare the rows that both benchmarks have.

    rows  named tuples of the present benchmark
    """
    compared = []
    for identity, values in best_values([row._asdict() for row in rows]).items():
        for field, now in values.items():
            then = before.values.get(identity, {}).get(field)
            if then is not None:
                is_rate = field in RATES[0]
                slower = then / now if is_rate else now / then
                text = " ".join(str(value) for key, value in identity if key not in SAME)
                compared.append(Ratio(text, field, then, now, slower))
    return compared


def slow(compared: Sequence[Ratio], tolerance: float) -> list[Ratio]:
    """Return the comparisons in which the value is more than `tolerance` times slower now."""
    return [ratio for ratio in compared if not (ratio.slower <= tolerance)]


def report(
    before: Before, facts: Mapping[str, Any], compared: Sequence[Ratio], tolerance: float
) -> list[str]:
    """Return lines: each compared value, the facts that changed, and the number of slow values."""
    wide = max((len(ratio.row) for ratio in compared), default=3)
    lines = ["", f"{'row':<{wide}} {'value':>14} {'before':>10} {'now':>10} {'slower':>8}"]
    lines += [
        f"{ratio.row:<{wide}} {ratio.field:>14} {figure(ratio.before):>10} {figure(ratio.now):>10} "
        f"{ratio.slower:>7.2f}{'!' * (not ratio.slower <= tolerance)}"
        for ratio in compared
    ]
    for name in ("mpitrain", "processor", "mpi", "host_names"):
        if before.header.get(name) != facts.get(name):
            lines.append(f"{name}: {before.header.get(name)} before, {facts.get(name)} now")
    number = len(slow(compared, tolerance))
    lines.append(
        f"{number} of {len(compared)} values are more than {tolerance:g} times slower"
        if compared
        else "no row is in both benchmarks"
    )
    return lines
