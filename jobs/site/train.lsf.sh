#!/bin/bash
# Not run on a real LSF: read it before you submit it.
# Train on 2 host(s) with 2 rank(s) each. Near its time limit the run saves a checkpoint and stops with exit code 85.
# The job then queues itself again, and the run resumes.
# A cancelled job ends at once: the batch system ends the ranks of the other hosts. Such a run goes on from its last
# periodic checkpoint (checkpoint.every). To go on, submit the script with --out and the old run directory.
# Written by: mpitrain slurm --lsf --nodes 2 --ranks-per-node 2 --cores-per-rank 32 -- train
# the name in bjobs:
#BSUB -J "mpitrain"
# ranks of the job:
#BSUB -n 4
# ranks of each host:
#BSUB -R "span[ptile=2]"
# cores of each rank:
#BSUB -R "affinity[core(32)]"
# whole hosts: no other job slows a rank:
#BSUB -x
# LSF ends the job then:
#BSUB -W 01:00
# the log; LSF appends:
#BSUB -o mpitrain-%J.out
# LSF queues the job again if it ends with 85: stopped after a checkpoint:
#BSUB -Q "85"
cd "${LS_SUBCWD:-.}" || exit  # the batch system runs a copy of this script in a folder of its own

start=(mpitrain launch --launcher mpirun --)
#start=(mpirun -n "${SLURM_NTASKS:-4}" apptainer exec --bind "$PWD" "mpitrain.sif" mpitrain)  # instead: an image with mpitrain and the MPI of mpirun
#mpitrain() { apptainer exec --bind "$PWD" "mpitrain.sif" mpitrain "$@"; }
#module load openmpi  # the MPI of the site, if mpi4py was built with it
venv=${MPITRAIN_VENV:-${VIRTUAL_ENV:-$PWD/.venv}}
[ -e "$venv/bin/activate" ] && source "$venv/bin/activate"
if [ -n "$MPITRAIN_VENV" ] && [ ! -x "$MPITRAIN_VENV/bin/mpitrain" ] || ! command -v mpitrain >/dev/null; then
  echo "no mpitrain in $venv. Name its environment as MPITRAIN_VENV=/path/to/.venv" >&2
  exit 2
fi

# Arguments that the system does not pass to a script: MPITRAIN_ARGS="--set run.steps=100"
[ $# != 0 ] || eval "set -- $MPITRAIN_ARGS" || exit 2

job=${MPITRAIN_JOB:-$LSB_JOBID}  # the first job of this run
run="runs/lsf-$job"
# The time limit is near: launch and srun pass USR1 on to every rank. It would end them in their first seconds.
trap 'while ((SECONDS < 20)); do sleep 1; done; kill -USR1 $P 2>/dev/null' USR1
trap 'cancelled=1; kill -USR1 $P' TERM  # cancelled or preempted
# This warning comes from the script, since the system sends none:
{ while ((SECONDS < 3540)); do sleep 1; done; kill -USR1 $$; } & timer=$!
"${start[@]}" train --out "$run" --resume=auto "$@" & P=$!
while kill -0 $P 2>/dev/null; do wait $P; done  # a trapped signal ends `wait` early
wait $P; rc=$?  # the shell remembers the exit code of a child
kill $timer
echo "the run in $run ended with $rc"
[ $rc = 85 ] && [ -n "$cancelled" ] && exit 143
exit $rc
