#!/bin/bash
# All-reduce between hosts that this script makes out of network namespaces: ring, halving-doubling, star, MPI's own, and wire
# formats, 8 MiB. Needs root.
#
#   jobs/hosts/bench.sh [FOLDER [HOSTS:MBIT ...]]
#
# with the MPI of the environment in use; results in FOLDER (default runs/bench-hosts). HOSTS:MBIT are the number of hosts and
# the rate of their links in Mbit/s, each number once (default 2:200 4:200 8:50: about 5 minutes). DELAY_US is the time of one
# way.
#
# Then a table against the bound 2(n-1)/n S/B, B being the payload rate of a one-way stream measured in the same run, and
# FOLDER/hosts.png, the time against the number of hosts.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:-runs/bench-hosts}")
settings=("${@:2}")
((${#settings[@]})) || settings=(2:200 4:200 8:50)
for setting in "${settings[@]}"; do
    [[ $setting =~ ^([2-9]|[1-5][0-9]|6[0-4]):[1-9][0-9]*$ ]] && continue
    echo "A setting is HOSTS:MBIT with 2 to 64 hosts, such as 4:200, but this is '$setting'." >&2
    exit 2
done
hosts=jobs/hosts/hosts.sh
mkdir -p "$folder"
trap '$hosts down' EXIT

for setting in "${settings[@]}"; do
    n=${setting%:*}
    RATE=${setting#*:} $hosts up "$n"
    $hosts on 2 python "$PWD/jobs/hosts/stream.py" receive > "$folder/$n.rate" &
    sleep 0.5
    $hosts on 1 python "$PWD/jobs/hosts/stream.py" send 10.77.0.2 5
    wait
    $hosts mpi "$n" python -m mpitrain bench all-reduce --algorithm ring,halving-doubling,star,native --wire fp16,topk:0.01 \
        --min-bytes 8M --max-bytes 8M --iterations "${ITERATIONS:-5}" --warmup 1 --json "$folder/$n.json"
done
python jobs/hosts/compare.py "$folder" "${settings[@]%:*}"
