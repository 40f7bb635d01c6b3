#!/usr/bin/env bash
# A job on 3 hosts with a spare on each loses all ranks of one host: a spare of another host takes the place.
#     bash jobs/hosts/spares.sh         the ranks of host 2 die, its daemon of mpirun lives
#     bash jobs/hosts/spares.sh host    all processes of host 2 die: mpirun ends, and launch starts the run again
#     bash jobs/hosts/spares.sh away    the same, and host 2 answers no more: the run starts on the other hosts
# The hosts are network namespaces. Needs root and the Open MPI 5 of the environment in use; a minute on two idle cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
hosts=$PWD/jobs/hosts net=10.77.0
run=$(mktemp -d)/run
trap '"$hosts/hosts.sh" down' EXIT
RATE=${RATE:-1000} "$hosts/hosts.sh" up 3
over="--prtemca plm_ssh_agent $hosts/agent.sh --prtemca prte_if_include $net.0/24 --mca btl tcp,self --mca btl_tcp_if_include $net.0/24"
python -m mpitrain launch --hosts $net.1,$net.2,$net.3 --ppn 2 --spares-per-host 1 --fault-tolerant --with "$over" -- train --out "$run" \
    --set run.on_failure=continue --set run.copies_every=2 --set replication.zero=1 --set checkpoint.every=10 --set run.steps=60 \
    --set run.log_every=20 --set run.eval_every=0 --set run.sample=0 --set run.delay=random:100:1 --set model.layers=2 --set model.width=32 \
    --set model.heads=2 --set model.context=32 --set batch.size=12 --set data.source=text:LICENSE &
job=$!
until [[ -s $run/metrics.jsonl ]]; do kill -0 $job; sleep 0.2; done
sleep 2
if [[ ${1:-} == away ]]; then ip -n mth2 link set eth0 down; fi
for process in $(ip netns pids mth2); do
    if [[ ${1:-} =~ host|away ]] || grep -aq mpitrain_launched "/proc/$process/cmdline"; then kill -9 "$process"; fi
done
wait $job
python -m mpitrain runs report "$run" | sed -n '/were lost/p; /finished/p; /of all [0-9]/p'
