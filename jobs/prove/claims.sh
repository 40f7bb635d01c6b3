#!/usr/bin/env bash
# Claim: `mpitrain learn claims` has the same verdicts in 20 repeats at a load of 8, each claim takes at most 20 s on an idle machine,
# and all together at most 5 min. About 15 minutes on two cores.
#     bash jobs/prove/claims.sh [PYTHON] [REPEATS]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3} repeats=${2:-20}
folder=$(mktemp -d) load=()
trap 'kill "${load[@]}" 2> /dev/null || true; rm -rf "$folder"' EXIT
start=$SECONDS
"$python" -m mpitrain learn claims --json "$folder/0.json" > "$folder/log"
idle=$((SECONDS - start))
for _ in $(seq 8); do
    "$python" -c "while True: pass" & load+=($!)
done
for n in $(seq "$repeats"); do
    "$python" -m mpitrain learn claims --json "$folder/$n.json" > "$folder/log"
done
"$python" - "$folder" "$repeats" "$idle" <<'PY'
import json, sys
from pathlib import Path

folder, repeats, idle = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
runs = [json.loads((folder / f"{n}.json").read_text()) for n in range(repeats + 1)]
found = [{each["name"]: (each["verdict"], [one["true"] for one in each["settings"]]) for each in run} for run in runs]
changed = sorted({name for other in found for name in other if other[name] != found[0][name]})
print(f"{len(found[0])} claims, {repeats} repeats at a load of 8: {len(changed)} changed {' '.join(changed)}; idle {idle} s")
sys.exit(bool(changed) or idle > 300)
PY
