#!/bin/bash
# Train on two nodes of an HPE Cray EX, with PBS and the launcher PALS. Not run on a real one: parsed by tests alone.
#
#   qsub jobs/site/train.pals.sh      from the folder of your runs; MPITRAIN_VENV names the environment, built on cray-mpich
#
# PBS cannot queue a running job again by itself: submit the script again after exit code 85, and the run goes on.
#PBS -N mpitrain
# Two nodes, two ranks on each, 32 cores for each rank.
#PBS -l select=2:ncpus=64:mpiprocs=2
# The job ends after an hour. mpitrain stops after a checkpoint when it gets a USR1.
#PBS -l walltime=01:00:00
# One file for standard output and standard error.
#PBS -j oe
set -uo pipefail
cd "${PBS_O_WORKDIR:-.}" || exit
source "${MPITRAIN_VENV:-$PWD/.venv}/bin/activate" || exit 2

ranks=4 per_node=2 cores=32
near_end=$((3600 - 120)) # seconds after the start at which the run shall stop

mpiexec -n "$ranks" --ppn "$per_node" --cpu-bind depth --depth "$cores" \
    mpitrain train --out "${RUN:-runs/pals}" --resume=auto "$@" &
launcher=$!
# PALS passes USR1 on to every rank.
{ while ((SECONDS < near_end)); do sleep 1; done; kill -USR1 "$launcher"; } &
timer=$!
wait "$launcher"
code=$?
kill "$timer" 2> /dev/null
exit "$code"
