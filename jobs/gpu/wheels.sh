#!/usr/bin/env bash
# Collects, where there is a package index, what jobs/gpu-table.sh may lack on a machine that has none: wheels for Python 3.12
# on x86-64 Linux of all that mpitrain needs and of an MPI, without NumPy, CuPy and PyTorch, which that machine must have.
#
#   jobs/gpu/wheels.sh [FOLDER]    default: runs/wheels, where jobs/gpu-table.sh looks for them; about 50 MB
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python3 jobs/gpu/wheels.py collect "$(realpath -m "${1:-runs/wheels}")"
