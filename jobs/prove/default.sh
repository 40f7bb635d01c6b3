#!/usr/bin/env bash
# Claim: the main job (2 ranks, defaults) ends in under two minutes on two free cores with a validation loss of at most
# 1.60 nats per byte.     bash jobs/prove/default.sh [PYTHON]
set -euo pipefail
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
began=$SECONDS
"$python" -m mpitrain launch -n 2 -- train --out "$folder/run"
seconds=$((SECONDS - began))
"$python" - "$folder/run/metrics.jsonl" "$seconds" <<'PY'
import json, sys

records = [json.loads(line) for line in open(sys.argv[1])]
loss, seconds = next(r["val_loss"] for r in records if "val_loss" in r), int(sys.argv[2])
print(f"validation loss {loss:.4f} (at most 1.60), {seconds} s (under 120), replicas equal: {records[-1]['replicas_equal']}")
sys.exit(not (loss <= 1.60 and seconds < 120 and records[-1]["replicas_equal"]))
PY
