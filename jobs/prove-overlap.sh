#!/usr/bin/env bash
# Claim: between two hosts joined by 200 Mbit/s the thread that moves reductions hides them behind the backward pass: a step of the
# GPT of `mpitrain bench train` is shorter than where messages move between layers only, and than PyTorch DDP's over gloo; where
# the backward pass takes about as long as the reductions (32 rows), at most 30% of their time is left to see.
# About 3 minutes on two free cores; makes hosts out of network namespaces, needs root and a C compiler.
#     bash jobs/prove-overlap.sh ["ROWS ..."] [BLOCKS] [STEPS] [SECTION.KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
rows=${1:-16 32} blocks=${2:-5} steps=${3:-5}
trap 'jobs/hosts/hosts.sh down' EXIT
RATE=${RATE:-200} jobs/hosts/hosts.sh up 2
for n in $rows; do # one BLAS thread: every network namespace believes that it owns all cores
    jobs/hosts/hosts.sh mpi 2 env OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 python "$PWD/jobs/hosts/overlap.py" "$n" "$blocks" "$steps" "${@:4}"
done
