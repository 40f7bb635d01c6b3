#!/usr/bin/env bash
# Claim: this tree takes at most 1.03 times as long as the tree of OLD_COMMIT, in the median, for a training step and for an
# all-reduce (2 ranks, the `auto` algorithm). Both trees run in this environment, in neighbouring pairs, of which every second one
# begins with the other tree; a ratio is taken within each pair. A middle half wider than 0.1 says that other work ran meanwhile:
# measure again. About 3 minutes on two free cores; at least 2 pairs.
#     bash jobs/prove/same-speed.sh OLD_COMMIT [PAIRS] [STEPS] [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$1 pairs=${2:-9} steps=${3:-10} python=${4:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/old" && git archive "$commit" | tar -x -C "$folder/old"
declare -A trees=([old]="$folder/old" [new]="$PWD")
for side in old new; do
    found=$(cd "$folder" && PYTHONPATH=${trees[$side]} "$python" -c "import mpitrain; print(mpitrain.__path__[0])")
    [ "$found" = "${trees[$side]}/mpitrain" ] || { echo "$python takes $found for the $side tree"; exit 1; }
done
measure() { # SIDE PAIR COMMAND...: its rows go to a file
    (cd "$folder" && PYTHONPATH=${trees[$1]} "$python" -m mpitrain launch -n 2 -- bench "${@:3}" --json "$3-$1-$2.json") \
        > "$folder/log" 2>&1 || { tail -5 "$folder/log"; exit 1; }
}
for ((pair = 0; pair < pairs; pair++)); do
    order="old new"
    ((pair % 2)) && order="new old"
    for side in $order; do measure "$side" "$pair" train --blocks 1 --steps "$steps" --device cpu; done
    for side in $order; do
        measure "$side" "$pair" allreduce --algorithm auto --min-bytes 4K --max-bytes 16M --factor 16
    done
done
"$python" - "$folder" "$pairs" <<'PY'
import json, sys
from pathlib import Path
from statistics import geometric_mean, median, quantiles

folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
found = [{(what, side): json.loads((folder / f"{what}-{side}-{pair}.json").read_text())
          for what in ("train", "allreduce") for side in ("old", "new")} for pair in range(pairs)]
def rows(run, side):
    return {row["bytes"]: row["time_us"] for row in run["allreduce", side]["rows"]}
def step(run, side):
    return run["train", side]["sides" if "sides" in run["train", side] else "rows"][0]

ratios = {"training step": [step(run, "new")["blocks"][0] / step(run, "old")["blocks"][0] for run in found]}
for nbytes in rows(found[0], "new"):
    ratios[f"all-reduce, {nbytes} bytes"] = [rows(run, "new")[nbytes] / rows(run, "old")[nbytes] for run in found]
sizes = [ratios[what] for what in ratios if what != "training step"]
ratios["all-reduce, mean"] = [geometric_mean(pair) for pair in zip(*sizes, strict=True)]
apart = max(abs(a - b) for run in found for a, b in zip(step(run, "old")["losses"], step(run, "new")["losses"], strict=True))
print(f"new time over old, {pairs} pairs: median, middle half, all; losses at most {apart:.1e} apart")
for what, values in ratios.items():
    low, _, high = quantiles(values, n=4, method="inclusive")
    print(f"{what:<28} {median(values):.3f}   {low:.3f} .. {high:.3f}   {min(values):.3f} .. {max(values):.3f}")
sys.exit(not all(median(ratios[what]) <= 1.03 for what in ("training step", "all-reduce, mean")))
PY
