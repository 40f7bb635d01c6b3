#!/usr/bin/env bash
# With a GPU at hand: are the kernels right, and how fast are they beside cuBLAS and PyTorch? One table: what, ours, the peer's,
# the ratio (above 1: ours is faster), and what it must be. The exit code is 1 if something is wrong, missing or too slow.
#
#   jobs/gpu-table.sh [DEVICE] [FOLDER]    with the python of the environment in use; results in FOLDER (default runs/gpu-table)
#
# DEVICE is cuda, or cuda-sim or cpu: those do the same with tiny sizes, to show that it runs; their ratios say nothing.
# TILES=FILE takes tiles from a table of `mpitrain bench gemm --device cuda --tune`. It takes about 10 minutes on a GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
device=${1:-cuda} folder=$(realpath -m "${2:-runs/gpu-table}")
mkdir -p "$folder" && rm -f "$folder"/*.json "$folder"/*.log "$folder"/*.failed
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

peer=(--peer torch)
python -c "import torch" 2> /dev/null || { echo "PyTorch is not installed: its columns stay empty (pip install torch)"; peer=(); }
if [[ $device == cuda ]]; then
    python -c "import sys; from mpitrain.machine.process import gpus; sys.exit(not gpus())" ||
        { echo "CuPy finds no GPU here: install mpitrain[cuda13] or [cuda12] and NVIDIA's driver, or try cuda-sim"; exit 2; }
    if [[ ${#peer[@]} -gt 0 ]] && ! python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        echo "PyTorch finds no GPU: its columns stay empty (it may be built for CPUs only: pip install torch)"
        peer=()
    fi
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    shapes=() dtypes=float32,bfloat16 bytes=67108864    # bench gemm's: two cubes, layers of sharded GPTs
    model="layers=12 width=768 heads=12 context=1024" batch=8 blocks=5 steps=10 tests=tests/gpu
else
    shapes=(--shapes 32,33x20x41) dtypes=float32,bfloat16 bytes=65536
    model="layers=1 width=32 heads=2 context=16" batch=2 blocks=2 steps=1 tests=tests/gpu/test_kernels.py
    [[ $device == cpu ]] && dtypes=float32
fi
keys=(--set "batch.size=$batch")
for key in $model; do keys+=(--set "model.$key"); done
tiles=() train_tiles=()
[[ -n ${TILES:-} ]] && tiles=(--tiles "$TILES") train_tiles=(--set "device.tiles=$TILES")

# Runs one measurement; what it prints goes to a log, from which the table quotes if it left no results.
measure() {
    local name=$1
    shift
    echo "$name ..." >&2
    "$@" > "$folder/$name.log" 2>&1 || echo "$name ended with exit code $?" | tee "$folder/$name.failed" >&2
}
measure tests python -m pytest -q -m gpu $tests
measure gemm python -m mpitrain bench gemm --device "$device" --dtype $dtypes --json "$folder/gemm.json" \
    ${shapes[@]+"${shapes[@]}"} ${tiles[@]+"${tiles[@]}"}
measure kernels python -m mpitrain bench kernels --device "$device" --json "$folder/kernels.json" ${peer[@]+"${peer[@]}"}
for gemm in tiled library; do
    name=train
    [[ $gemm == library ]] && name=train-library
    measure $name python -m mpitrain bench train --device "$device" --gemm $gemm --blocks $blocks --steps $steps "${keys[@]}" \
        --json "$folder/$name.json" ${peer[@]+"${peer[@]}"} ${train_tiles[@]+"${train_tiles[@]}"}
done
for aware in yes no; do
    measure "ring-$aware" mpirun -n 2 python jobs/gpu/ring.py "$device" $aware $bytes
    grep '^{' "$folder/ring-$aware.log" > "$folder/ring-$aware.json"
done
python jobs/gpu/table.py "$folder" "$device"
