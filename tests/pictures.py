"""Every picture that a command draws, and a sheet with thumbnails of all: to be looked at before a picture lands.

python -m tests.pictures FOLDER
"""

import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from mpitrain.cli import commands
from mpitrain.tools.bench import pictures as bench
from mpitrain.tools.bench.pairs import BETWEEN
from mpitrain.tools.bench.plot_loss import draw as draw_losses
from mpitrain.tools.textbook.explain.picture import draw_for_a_wall
from mpitrain.tools.textbook.explain.topics import TOPICS
from tests.ranks.bench.test_pairs import links, usual
from tests.unit.bench.test_bench_table import FACTS, row

ACROSS, WIDE = 6, 320
"""Thumbnails in a row, and the pixels of one."""
PLANS = {
    "schedule": "schedule --schedule zero-bubble",
    "schedule-long": "schedule --schedule interleaved --stages 4 --micro-batches 32",
    "schedule-async": "schedule --schedule async --stages 3 --micro-batches 3",
    "allreduce": "all-reduce --algorithm ring --ranks 4",
    "allreduce-many": "all-reduce --algorithm recursive-doubling --ranks 64",
    "layouts": "layout --preset gpt2-124m --ranks 16 --hosts 4 --rate 60 --memory 2 --device cpu",
}
"""{name of a picture: words of `mpitrain plan`}."""


def losses(rate, steps=400):
    """The metrics of a run whose loss falls from 5.5 to 1.4, the later the smaller its rate."""
    trained = [
        {"step": step, "loss": 1.4 + 4.1 * math.exp(-rate * step), "wall_s": step * 0.1}
        for step in range(1, steps + 1)
    ]
    return [*trained, {"step": steps, "val_loss": trained[-1]["loss"] + 0.1, "wall_s": 0.1 * steps}]


def draw_all(folder):
    """Draw all pictures; return their files."""
    for name, topic in TOPICS.items():
        if topic.runs_here:
            draw_for_a_wall(topic.explained(topic.setting(name)), folder / f"{name}.png", "en")
    for name, words in PLANS.items():
        file = str(folder / f"plan-{name}.png")
        commands.main(["plan", *words.split(), "--plot", file], standalone_mode=False)
    rates = {"one": 0.01, "two": 0.02, "three": 0.005, "four": 0.03}
    runs = {f"runs/{name}": losses(rate) for name, rate in rates.items()}
    draw_losses(dict([*runs.items()][:1]), "steps", False, folder / "run.png")
    draw_losses(runs, "time", False, folder / "runs.png")
    sweep = {f"runs/sweep-17/optimizer.lr={2.0**-n:g}": losses(0.1 / n) for n in range(1, 17)}
    draw_losses(sweep, "steps", True, folder / "runs-sweep.png")
    apart = {f"/scratch/group/user{n}/{'long/' * 6}run": losses(0.01 * n) for n in range(1, 5)}
    draw_losses(apart, "steps", False, folder / "runs-long-names.png")
    sizes = [2**n - 4 * (n < 12) for n in range(10, 27, 2)]  # rounded down to whole elements
    algorithms = {"ring": (40, 2e3), "native": (20, 1e3), "halving-doubling": (30, 1.5e3)}
    rows = [
        row(name, nbytes, start + nbytes / speed, p99=2 * (start + nbytes / speed))
        for name, (start, speed) in algorithms.items()
        for nbytes in sizes
    ]
    for nbytes in sizes:
        best = min((r for r in rows if r.bytes == nbytes), key=lambda r: r.time_us)
        rows.append(row("auto", nbytes, best.time_us, chosen=best.algorithm))
    bench.plot(rows, FACTS, folder / "bench-all-reduce.png")
    uneven = {(0, 1): 1.08, (0, 2): 1.04}
    healthy = links(lambda a, b, n: usual(a, b, n) * uneven.get((a, b), 1), "abcd")
    slow = links(lambda *words: usual(*words, slow=[(0, 2)], times=10.0), "aabbccdd")
    for name, pairs in (("healthy", healthy), ("slow", slow)):
        bench.plot_pairs(pairs, [BETWEEN], FACTS | {"hosts": 4}, folder / f"bench-pairs-{name}.png")
    return sorted(folder.glob("*.png"))


def draw_sheet(files, path):
    """Draw a thumbnail of each file, with its name."""
    high = WIDE * 9 // 16 + 16
    sheet = Image.new("RGB", (ACROSS * (WIDE + 4), -(-len(files) // ACROSS) * high), "#606060")
    for number, file in enumerate(files):
        place = number % ACROSS * (WIDE + 4), number // ACROSS * high
        with Image.open(file) as picture:
            thumbnail = picture.convert("RGB")
        thumbnail.thumbnail((WIDE, high - 16))
        sheet.paste(thumbnail, (place[0], place[1] + 14))
        ImageDraw.Draw(sheet).text(place, file.stem, fill="white")
    sheet.save(path, optimize=True)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(exist_ok=True)
    drawn = [file for file in draw_all(out) if file.name != "sheet.png"]
    draw_sheet(drawn, out / "sheet.png")
    print(f"{len(drawn)} pictures, and {out / 'sheet.png'}")
