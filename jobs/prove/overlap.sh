#!/usr/bin/env bash
# What a thread that moves reductions hides of them behind the backward pass, between two hosts joined by 200 Mbit/s: steps of the
# job gpt of `mpitrain compare` in turns without overlap, with messages moved between layers only, and with the thread; PyTorch
# DDP over gloo, if it is installed, beside them. With 16 rows the reductions take longer than the backward pass, with 32 about
# as long. First a claim: where compute sleeps, all-reduce and ZeRO 1, 2 and 3 with overlap expose at most 30 % of the communication
# that they expose without. About 5 minutes on two free cores; makes hosts out of network namespaces, needs root and a C compiler.
#     bash jobs/prove/overlap.sh ["ROWS ..."] [BLOCKS] [STEPS] [SECTION.KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
rows=${1:-16 32} blocks=${2:-5} steps=${3:-2}
trap 'jobs/hosts/hosts.sh down' EXIT
RATE=${RATE:-200} jobs/hosts/hosts.sh up 2
one="env OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1" # every network namespace believes that it owns all cores
jobs/hosts/hosts.sh mpi 2 $one python "$PWD/jobs/hosts/exposed.py" 12 65536 10 3 4
for n in $rows; do
    jobs/hosts/hosts.sh mpi 2 $one python "$PWD/jobs/hosts/overlap.py" "$n" "$blocks" "$steps" "${@:4}"
done
