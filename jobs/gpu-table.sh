#!/usr/bin/env bash
# On a machine with a GPU: are the kernels right, and how fast are they? Prints one table after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python -m pytest -q -m gpu tests/gpu
mpitrain bench gemm --device cuda --sizes 1024,2048,4096,8192
mpitrain bench gemm --device cuda --sizes 1024,2048,4096,8192 --dtype float16
mpitrain bench kernels --device cuda
