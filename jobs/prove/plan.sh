#!/usr/bin/env bash
# Claim: of 24 layouts on 1 to 8 ranks `plan layout` predicts the step within 20% (median); the best predicted takes at most 1.1
# times as long as the best measured one of these ranks; and Kendall's tau is at least 0.7. Layers sleep (plan.py), messages are
# real: within one host, between 2 hosts, and between 4, which are network namespaces joined by links of RATE Mbit/s and DELAY_US
# one way, measured by `bench fit` first. Errors are printed by part. The memory of the fullest rank is within 1% (median). About
# 10 minutes; needs root and a C compiler. On a busy machine sleepers wake late, and messages take longer than predicted.
#     bash jobs/prove/plan.sh [PYTHON] [FILE]
# On a machine without other work, five layouts of a GPT that computes, on 2 ranks:
#     python jobs/prove/plan.py measure 0 FILE && python jobs/prove/plan.py judge FILE
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "${1:-python3}") file=$(realpath -m "${2:-runs/plan.jsonl}")
mkdir -p "$(dirname "$file")"
rm -f "$file"
trap 'jobs/hosts/hosts.sh down' EXIT
one="env OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1" # every network namespace believes that it owns all cores
for ranks in 1 2; do $one "$python" jobs/prove/plan.py measure $ranks "$file"; done
RATE=${RATE:-25} jobs/hosts/hosts.sh up 4
tuning="$file.tuning"
rm -f "$tuning"
for places in 2,2 2,2,2,2; do
    jobs/hosts/hosts.sh mpi $places $one "$python" -m mpitrain bench fit --out "$tuning" --sweeps 1 --min-bytes 1K --max-bytes 1M
    ranks=$((${places//,/+}))
    jobs/hosts/hosts.sh mpi $places $one "$python" "$PWD/jobs/prove/plan.py" measure $ranks "$file" "$tuning"
done
"$python" jobs/prove/plan.py judge "$file" && echo "as claimed" || { echo "missed"; exit 1; }
