#!/bin/bash
# All-reduce between hosts that this script makes out of network namespaces: ring, halving-doubling, star, MPI's own, and wire
# formats, 8 MiB, on 2 and 4 hosts at 200 Mbit/s and on 8 at 50 Mbit/s. Takes about 5 minutes per MPI; needs root.
#
#   jobs/bench-hosts.sh [FOLDER]     with the MPI of the environment in use; results in FOLDER (default runs/bench-hosts)
#
# Then a table against the bound 2(n-1)/n S/B, B being the payload rate of a one-way stream measured in the same run, and
# FOLDER/hosts.png, the time against the number of hosts.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-runs/bench-hosts}")
hosts=jobs/hosts/hosts.sh
mkdir -p "$folder"
trap '$hosts down' EXIT

for setting in 2:200 4:200 8:50; do
    n=${setting%:*}
    RATE=${setting#*:} $hosts up "$n"
    $hosts on 2 python "$PWD/jobs/hosts/stream.py" receive > "$folder/$n.rate" &
    sleep 0.5
    $hosts on 1 python "$PWD/jobs/hosts/stream.py" send 10.77.0.2 5
    wait
    $hosts mpi "$n" python -m mpitrain bench allreduce --algorithm ring,halving-doubling,star,native --wire fp16,topk:0.01 \
        --min-bytes 8M --max-bytes 8M --iterations "${ITERATIONS:-5}" --warmup 1 --json "$folder/$n.json"
done
python jobs/hosts/compare.py "$folder"
