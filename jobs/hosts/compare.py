"""What jobs/hosts/bench.sh measured, against what the links allow: `compare.py FOLDER HOSTS ...` prints a table and
draws hosts.png.

S bytes, n hosts, B bytes per second of a one-way stream: no all-reduce takes less than 2(n-1)/n S/B. A star takes
2(n-1) S/B, since its root's link carries every array in and every result out.
"""

import json
import sys
from pathlib import Path

from mpitrain.errors import MpitrainError
from mpitrain.plots import add_legend, check_drawable, look, save, subplots, wrapped

CODED = {"wire fp16": 516 / 1024, "wire bf16": 1 / 2}  # bytes that a byte of float32 becomes

folder = Path(sys.argv[1])
times: dict[str, dict[int, float]] = {}
bounds, stars, mbit = {}, {}, {}
print(
    f"{'hosts':>5} {'B MB/s':>7} {'algorithm':<17} {'ms':>9} {'bound ms':>9} {'ratio':>6} {'ring is':>9}"
)
for n in sorted(set(map(int, sys.argv[2:]))):
    path = folder / f"{n}.json"
    rate = float(path.with_suffix(".rate").read_text())
    results = json.loads(path.read_text())
    rows = {row["algorithm"]: row for row in results["rows"]}
    nbytes = rows["ring"]["bytes"]
    bounds[n], stars[n] = 2 * (n - 1) / n * nbytes / rate * 1e3, 2 * (n - 1) * nbytes / rate * 1e3
    for name, row in rows.items():
        ms = row["time_us"] / 1e3
        times.setdefault(name, {})[n] = ms
        bound = stars[n] if name == "star" else bounds[n] * CODED.get(name, 1)
        against_ring = rows["ring"]["time_us"] / 1e3 / ms
        print(
            f"{n:5} {rate / 1e6:7.2f} {name:<17} {ms:9.1f} {bound:9.1f} {ms / bound:6.2f} {against_ring:8.2f}x"
            + (f"  {row['wrong']} WRONG" if row["wrong"] else "")
        )
    mbit[n] = rate * 8 / 1e6
print(f"{results['header']['mpi']}; star's bound is 2(n-1) S/B, that of fp16 516/1024 of a ring's")

drawn = folder / "hosts.png"
try:
    check_drawable(drawn)
except MpitrainError as error:
    sys.exit(f"no picture: {error}")
figure, axes = subplots()
for number, name in enumerate(("star", "native", "halving-doubling", "ring", "wire fp16")):
    # Ring and halving-doubling nearly coincide: one is broad, the other lies on it.
    colour, dash, mark = look(number)
    axes.plot(
        list(times[name]),
        [times[name][n] / bounds[n] for n in times[name]],
        color=colour,
        linestyle=dash,
        marker=mark,
        linewidth=7 if name == "halving-doubling" else None,
        alpha=0.5 if name == "halving-doubling" else 1,
        label=name,
    )
axes.plot(
    list(bounds), [1] * len(bounds), "k:", label="bound: 2(n-1)/n of the array through one link"
)
axes.set(
    ylabel="time over the bound",
    ylim=(0, None),
    xlabel=f"{results['header']['mpi']}; hosts are namespaces of one machine of {results['header']['cores']} cores",
)
axes.set_title(wrapped("All-reduce of 8 MiB: a star's root is the bottleneck, a ring has none"))
axes.set_xticks(list(bounds), labels=[f"{n} hosts\n{mbit[n]:.0f} Mbit/s" for n in bounds])
axes.grid()
add_legend(figure, axes)
save(figure, drawn)
print(f"drawn: {drawn}")
