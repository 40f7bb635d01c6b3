#!/usr/bin/env bash
# Claim: the default GPT (400 steps, 2 ranks, mean validation loss of three seeds) loses at most 0.02 nats per byte to gradients
# that travel as fp16 or bf16, 0.03 as int8, 0.15 as powersgd:4 or topk:0.1. topk:0.01 after 50 dense steps is reported.
# 21 runs, about 25 minutes on two free cores; a run that has ended is not repeated.
#     bash jobs/prove-wires.sh [PYTHON] [FOLDER] [SEEDS]
set -euo pipefail
python=${1:-python3} folder=${2:-runs/prove-wires} seeds=${3:-"1 2 3"}
mkdir -p "$folder"
for seed in $seeds; do
    for wire in none fp16 bf16 int8 powersgd:4 topk:0.1 topk:0.01; do
        run="$folder/${wire/:/-}-$seed"
        grep -qs '"event": "end"' "$run/metrics.jsonl" && continue
        dense=0
        [[ $wire == topk:0.01 ]] && dense=50
        rm -rf "$run"
        "$python" -m mpitrain launch -n 2 -- train --out "$run" --set run.seed="$seed" \
            --set replication.wire="$wire" --set replication.dense_steps=$dense --set run.eval_every=0 > "$run.log" 2>&1 ||
            { tail -5 "$run.log"; exit 1; }
    done
done
"$python" - "$folder" "$seeds" <<'PY'
import json, statistics, sys
from pathlib import Path

folder, seeds = Path(sys.argv[1]), sys.argv[2].split()
losses = {}
for wire in ("none", "fp16", "bf16", "int8", "powersgd-4", "topk-0.1", "topk-0.01"):
    for seed in seeds:
        lines = [json.loads(line) for line in (folder / f"{wire}-{seed}/metrics.jsonl").open()]
        assert lines[-1]["replicas_equal"], (wire, seed)
        losses.setdefault(wire, []).append([line["val_loss"] for line in lines if "val_loss" in line][-1])
allowed = {"fp16": 0.02, "bf16": 0.02, "int8": 0.03, "powersgd-4": 0.15, "topk-0.1": 0.15}
base, failed = statistics.mean(losses["none"]), False
print(f"{'wire':<12} {'mean':>7} {'spread':>7} {'to none':>8} {'allowed':>8}")
for wire, found in losses.items():
    mean = statistics.mean(found)
    print(f"{wire:<12} {mean:7.4f} {max(found) - min(found):7.4f} {mean - base:+8.4f} {allowed.get(wire, ''):>8}")
    failed |= not (mean - base <= allowed.get(wire, float("inf")))
sys.exit(failed)
PY
