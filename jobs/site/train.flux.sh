#!/bin/bash
# Train on two nodes with Flux. Not run on a real one: parsed by tests alone.
#
#   flux batch jobs/site/train.flux.sh      from the folder of your runs; MPITRAIN_VENV names the environment
#
# Flux gives ranks PMI-1, which MPICH takes. Open MPI 5 needs the plugin flux-pmix: MPI=openmpi flux batch ...
#flux: --job-name=mpitrain
# Two whole nodes for an hour.
#flux: --nodes=2 --exclusive --time-limit=1h
# A USR1 comes two minutes before the limit: the run stops after a checkpoint, with code 85.
#flux: --signal=SIGUSR1@120
#flux: --output=mpitrain-{{id}}.out
set -uo pipefail
source "${MPITRAIN_VENV:-$PWD/.venv}/bin/activate" || exit 2

options=(--nodes=2 --ntasks=4 --cores-per-task=32)
[[ ${MPI:-mpich} == openmpi ]] && options+=(-o pmi=pmix)

trap 'kill -USR1 "$launcher"' USR1
flux run "${options[@]}" mpitrain train --out "${RUN:-runs/flux}" --resume=auto "$@" &
launcher=$!
while kill -0 "$launcher" 2> /dev/null; do wait "$launcher"; done # a trapped signal ends `wait` early
wait "$launcher"
code=$?
# Queue the job again to go on: the run reads its newest checkpoint. The Flux of this job ends with it, its parent does not.
[[ $code == 85 ]] && flux --parent batch "$0" "$@"
exit "$code"
