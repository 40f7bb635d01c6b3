#!/usr/bin/env bash
# `mpitrain compare` between hosts: 8 ranks on 4 hosts, made out of network namespaces and joined by links of RATE Mbit/s
# (default 50) and DELAY_US one way (default 1000), with the MPI of the environment in use. Needs root; about 2 minutes.
#     bash jobs/hosts/compare.sh [OPTION OF mpitrain compare ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
trap 'jobs/hosts/hosts.sh down' EXIT
RATE=${RATE:-50} jobs/hosts/hosts.sh up 4
one="env OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1" # every network namespace believes that it owns all cores
jobs/hosts/hosts.sh mpi 2,2,2,2 $one python -m mpitrain compare --steps 8 --blocks 1 --set model.layers=2 --set model.width=64 \
    --set model.context=32 --set replication.period=4 "$@"
