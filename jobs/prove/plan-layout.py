"""How far the predictions of `plan layout` are from measured steps, on ranks of this machine.

    python jobs/prove/plan-layout.py [RANKS]

Trains a GPT in every layout with ZeRO 0, 1 and 3, in turns, TURNS times STEPS steps; prints the predicted and the
measured step of each. Exit code 1 if the median error is above 20%, if the best predicted layout takes more than 1.1 times as
long as the best measured one, or if Kendall's tau of layouts whose measured steps differ by more than 5% is below 0.7. It needs
a machine without other work.
"""

import json
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from statistics import median

RANKS = sys.argv[1] if len(sys.argv) > 1 else "2"
JOB = [
    "--set",
    "batch.size=16",
    "--set",
    "model.context=256",
    "--set",
    "model.width=256",
    "--device",
    "cpu",
]
TURNS, STEPS = 3, 8
MPITRAIN = [sys.executable, "-m", "mpitrain"]


def measured(folder: Path, settings: dict[str, str | int]) -> float:
    """Return the fastest step of a run, in s."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    usual = ["--set", "run.sample=0", "--set", "run.eval_rows=1", "--steps", str(STEPS)]
    line = [
        *MPITRAIN,
        "launch",
        "-n",
        RANKS,
        "--",
        "train",
        *JOB,
        *words,
        *usual,
        "--out",
        str(folder),
    ]
    subprocess.run(line, check=True, capture_output=True)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return min(
        record["step_s"] for record in records if record.get("step", 0) > 2 and "step_s" in record
    )


with tempfile.TemporaryDirectory() as made:
    file = Path(made) / "layouts.json"
    plan = [*MPITRAIN, "plan", "layout", "--ranks", RANKS, *JOB, "--json", str(file)]
    print(subprocess.run(plan, check=True, capture_output=True, text=True).stdout)
    rows: dict[tuple, dict] = {}
    for row in json.loads(file.read_text())["rows"]:  # the fastest first
        layout = row["layout"]
        kind = (
            *(layout[f"layout.{axis}"] for axis in ("dp", "cp", "tp", "pp")),
            layout["replication.zero"],
        )
        if kind[-1] in (0, 1, 3) and layout["memory.recompute"] == "none":
            rows.setdefault(kind, row)
    found: dict[tuple, list[float]] = {kind: [] for kind in rows}
    for turn in range(TURNS):
        for number, (kind, row) in enumerate([*rows.items()]):
            try:
                found[kind].append(measured(Path(made) / f"{turn}-{number}", row["layout"]))
            except subprocess.CalledProcessError as error:
                print(kind, error.stderr.decode()[-300:])
                del rows[kind], found[kind]

steps = [(kind, row["step_s"], min(found[kind])) for kind, row in rows.items()]
print("dp cp tp pp zero   predicted ms   measured ms   error")
for kind, predicted, seen in steps:
    print(
        *(f"{n:2}" for n in kind),
        f"{1e3 * predicted:16.1f} {1e3 * seen:13.1f} {100 * (predicted / seen - 1):+7.1f}%",
    )
middle = median(abs(predicted / seen - 1) for _, predicted, seen in steps)
loss = next(seen for _, _, seen in steps) / min(seen for _, _, seen in steps)
pairs = [(a, b) for a, b in combinations(steps, 2) if abs(a[2] / b[2] - 1) > 0.05]
tau = sum(1 if (a[1] < b[1]) == (a[2] < b[2]) else -1 for a, b in pairs) / max(1, len(pairs))
print(f"median error {100 * middle:.1f}%; the best predicted takes {loss:.2f} of the best measured")
print(f"tau {tau:.2f} of {len(pairs)} pairs")
sys.exit(middle > 0.2 or loss > 1.1 or (bool(pairs) and tau < 0.7))
