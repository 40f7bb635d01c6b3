#!/usr/bin/env bash
# Compiles, where there is NVRTC but no GPU, the kernels that jobs/gpu-table.sh loads: half a minute of the job's ten saved.
#
#   jobs/gpu/cubins.sh [FOLDER] [CAPABILITY]    default: runs/cubins, where jobs/gpu-table.sh looks for them, and 90
#
# NVRTC must be of the GPU machine's version, in wheels: nvidia-cuda-nvrtc, with nvidia-cuda-runtime and nvidia-cuda-crt.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python3 jobs/gpu/cubins.py "$(realpath -m "${1:-runs/cubins}")" "${2:-90}"
