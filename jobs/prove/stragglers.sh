#!/usr/bin/env bash
# Claim: with four workers whose steps take 40 ms, and each twice as long with probability 1/4, asynchronous servers make at least
# 1.2 times as many steps per second as synchronous ones, and a bound lies between; with one worker that always takes twice as
# long, a bound buys nothing and none much. Leads are at most s steps, and staleness (workers-1)(2s+1) updates, with bound s.
# The workers sleep, so that two cores are enough. About 2 minutes.
#     bash jobs/prove/stragglers.sh [PYTHON] [STEPS] [MS]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} steps=${2:-80} ms=${3:-40}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for late in "random:$ms:0.25" "3:$ms"; do
    for run in server-sync:2 server-bounded:2 server-bounded:8 server-async:2; do
        "$python" -m mpitrain launch -n 5 -- compare "${run%:*}" --steps "$steps" --blocks 1 --json "$folder/$late,$run.json" \
            --set replication.staleness="${run#*:}" --set run.delay="random:$ms:1,$late" --set model.layers=1 \
            --set model.width=16 --set model.context=16 --set batch.size=8 > "$folder/log" 2>&1 || { tail -5 "$folder/log"; exit 1; }
    done
done
"$python" - "$folder" "$ms" <<'PY'
import json, sys
from pathlib import Path

folder, ms, workers, missed = Path(sys.argv[1]), sys.argv[2], 4, False
print(f"{workers} workers, one server; every step sleeps {ms} ms, and these ones as long again")
print(f"{'longer':<15} {'update':<12} {'step ms':>8} {'to sync':>8} {'lead':>5} {'stale':>6}")
for late, said in ((f"random:{ms}:0.25", "1/4 of all"), (f"3:{ms}", "rank 3's")):
    ratios = {}
    for run in ("server-sync:2", "server-bounded:2", "server-bounded:8", "server-async:2"):
        row, = json.loads((folder / f"{late},{run}.json").read_text())["rows"]
        name, bound = run.removeprefix("server-").split(":")
        name += f"({bound})" * (name == "bounded")
        rate = row["samples"] / row["step_s"]
        ratios[name] = rate / ratios.setdefault("base", rate)
        broken = name.startswith("bounded") and not (
            row["lead"] <= int(bound) and row["staleness"] <= (workers - 1) * (2 * int(bound) + 1))
        missed |= broken
        print(f"{said:<15} {name:<12} {1e3 * row['step_s']:8.1f} {ratios[name]:8.2f} {row['lead']:5} {row['staleness']:6}"
              + "  beyond the bound" * broken)
    if late.startswith("random"):
        missed |= not (ratios["async"] >= 1.2 and 1 < ratios["bounded(2)"] <= 1.05 * ratios["bounded(8)"])
    else:
        missed |= not (abs(ratios["bounded(2)"] - 1) <= 0.1 and ratios["async"] > 1.1)
print("missed" if missed else "as claimed")
sys.exit(missed)
PY
