#!/usr/bin/env bash
# Question: what do the overlap in the backward of column-parallel layers, rows of their own, and keeping what was gathered do to the
# time of a training step of two ranks that share layers? The GPT of `mpitrain bench train`, all ways in turns; about 90 s.
#     bash jobs/prove/compare-tensor.sh [SECTION.KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_osc=^ucx OMPI_MCA_pml=ob1 OMPI_MCA_btl=sm,self
export PYTHONPATH="$PWD"
mpirun -n 2 --bind-to none --oversubscribe python jobs/prove/turns.py "$@"
