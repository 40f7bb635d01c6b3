#!/usr/bin/env bash
# Claim: the default GPT (400 steps, 2 ranks, mean validation loss of three seeds) ends within 0.02 nats per byte of float32 in
# bfloat16 and in float16.
# 9 runs, about 20 minutes on two free cores; a run that has ended is not repeated.
#     bash jobs/prove/half.sh [PYTHON] [FOLDER] [SEEDS]
set -euo pipefail
python=${1:-python3} folder=${2:-runs/prove-half} seeds=${3:-"1 2 3"}
mkdir -p "$folder"
for seed in $seeds; do
    for compute in float32 bfloat16 float16; do
        run="$folder/$compute-$seed"
        grep -qs '"event": "end"' "$run/metrics.jsonl" && continue
        rm -rf "$run"
        "$python" -m mpitrain launch -n 2 -- train --out "$run" --set run.seed="$seed" --set precision.compute="$compute" \
            --device cpu > "$run.log" 2>&1 || { tail -5 "$run.log"; exit 1; }
    done
done
"$python" - "$folder" "$seeds" <<'PY'
import json, statistics, sys
from pathlib import Path

folder, seeds, mean = Path(sys.argv[1]), sys.argv[2].split(), {}
print(f"{'compute':<10} {'mean':>7} {'spread':>7} {'to float32':>10} {'skipped':>8} {'loss scale':>10}")
for compute in ("float32", "bfloat16", "float16"):
    runs = [[json.loads(line) for line in (folder / f"{compute}-{seed}/metrics.jsonl").open()] for seed in seeds]
    assert all(lines[-1]["replicas_equal"] for lines in runs), compute
    losses = [[line["val_loss"] for line in lines if "val_loss" in line][-1] for lines in runs]
    skipped = sum("overflow" in line for lines in runs for line in lines)
    scale = [line.get("loss_scale", 1) for line in runs[-1] if "lr" in line][-1]
    mean[compute] = statistics.mean(losses)
    print(f"{compute:<10} {mean[compute]:7.4f} {max(losses) - min(losses):7.4f} {mean[compute] - mean['float32']:+10.4f} "
          f"{skipped:8} {scale:10g}")
sys.exit(not all(abs(found - mean["float32"]) <= 0.02 for found in mean.values()))
PY
