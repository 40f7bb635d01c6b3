#!/usr/bin/env bash
# Question: what do rows of 1024 to 16384 tokens cost on four hosts joined by RATE Mbit/s (200), if the hosts divide their tokens
# (ulysses4, ring4) or the layers (tp4, tp4+sequence)? Steps of one row in turns, with the bytes that a host sends and the MB that it holds.
# About 6 minutes; makes hosts out of network namespaces, needs root and a C compiler.
#     bash jobs/prove/context.sh ["TOKENS ..."] [SECTION.KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
trap 'jobs/hosts/hosts.sh down' EXIT
jobs/hosts/hosts.sh up 4
job=(--set model.layers=2 --set model.width=64 --set batch.size=1 --set run.eval_rows=1)
for tokens in ${1:-1024 4096 16384}; do
    jobs/hosts/hosts.sh mpi 4 env OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 mpitrain compare --steps 3 \
        ulysses4 ring4 tp4 tp4+sequence "${job[@]}" --set "model.context=$tokens" "${@:2}"
done
