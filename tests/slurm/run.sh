#!/bin/bash
# Prove the batch scripts on a real Slurm of four virtual nodes: brings it up, runs tests/slurm, takes it down.
#   tests/slurm/run.sh [options of pytest]        Root on Debian; about ten minutes on two idle cores.
# Where Slurm cannot be installed, it says why and ends with 0: nothing is proven then.
here=$(dirname "$(realpath "$0")")
"$here/cluster.sh" up
case $? in
  0) ;;
  77) echo "tests/slurm: skipped"; exit 0 ;;
  *) exit 1 ;;
esac
trap '"$here/cluster.sh" down' EXIT
cd "$here/../.." && MPITRAIN_SLURM=1 python -m pytest tests/slurm -p no:xdist -p no:cacheprovider -rs "$@"
