"""The batch systems: their directives, variables, and the way to run a stopped job again."""

import re
from typing import Any, NamedTuple

from mpitrain.cli.slurm.request import BatchJob, clock
from mpitrain.errors import ConfigError

DIRECTIVE = re.compile(r"(?:(?P<fact>\w+)\? )?(?P<option>.*?) +# (?P<reason>.*)")
"""A line of the head of a script: FACT? OPTION # REASON. Without that fact, it is left out."""


class ScriptSystem(NamedTuple):
    """A batch system.

    submit      the command that reads a script, and how
    prefix      the start of a directive's line
    directives  the head of a script, in lines of DIRECTIVE; braces name facts of the job
    folder      variable of the folder in which the job was submitted
    job         variable of the job's number
    array, task variables of an array's number, and of a task's index
    first_task  index of the first task
    again       lines that run a stopped job again, indented; empty: the system does so by itself
    stopped     exit code of a job that was cancelled after a checkpoint
    """

    submit: str
    prefix: str
    directives: str
    folder: str
    job: str
    array: str
    task: str
    first_task: int
    again: str
    stopped: int

    @property
    def is_slurm(self) -> bool:
        """Whether the system is Slurm, the only one on which scripts have run.

        Slurm alone divides the cores of a host, takes reasons in a directive's line, passes
        arguments to a script, and warns it before the time limit.
        """
        return self.prefix == "#SBATCH"


def directives(system: ScriptSystem, request: BatchJob, resumes: bool) -> list[tuple[str, str]]:
    """Return pairs of (option, reason) for the head of a script.

    raises  ConfigError if the system needs a number that is not given
    """
    if not (system.is_slurm or request.cores_per_rank):
        raise ConfigError(
            f"{system.prefix[1:]} needs the number of cores of a rank, but --cores-per-rank is not given.",
            "Divide the cores of a node by --ranks-per-node.",
        )
    facts = _facts(request, resumes)
    return [
        (option.format(**facts), reason.format(**facts))
        for fact, option, reason in DIRECTIVE.findall(system.directives)
        if not fact or facts[fact]
    ] + [(option, "as given with --with") for option in request.extra]


def _facts(request: BatchJob, resumes: bool) -> dict[str, Any]:
    r = request
    return r._asdict() | {
        "ranks": r.ranks,
        "cores_per_node": r.cores_per_rank * r.ranks_per_node,
        "whole_hosts": not r.cores_per_rank,
        "start": "one rank per GPU" if r.gpus_per_node else "one rank per socket is a good start",
        "ngpus": f":ngpus={r.gpus_per_node}" if r.gpus_per_node else "",
        "clock": clock(r.seconds),
        "warning": r.warning,
        "resumes": resumes,
        "rerun": "y" if resumes else "n",
        "one": not r.sweep,
        "runs": len(r.sweep),
        "last": len(r.sweep) - 1,
    }


SLURM = """\
--job-name=mpitrain # the name in squeue
--nodes={nodes} # hosts
--ntasks-per-node={ranks_per_node} # ranks of each host: {start}
cores_per_rank? --cpus-per-task={cores_per_rank} # cores of each rank, a thread on each
whole_hosts? --exclusive # whole hosts: no other job slows a rank, and ranks divide all cores
gpus_per_node? --gpus-per-node={gpus_per_node} # GPUs of each host; rank i takes GPU i. \
With --gpus-per-task no rank would see the memory of another
--time={clock} # Slurm ends the job then; shorter jobs start earlier
resumes? --signal=B:USR1@{warning} # a second warning; the run asks squeue for the end of the job itself
resumes? --requeue # Slurm may queue the job again, under the same number
runs? --array=0-{last} # one task for each run; %4 at the end: four at a time
runs? --output=%x-%A_%a.out # the log of each task
one? --output=%x-%j.out # the log, in the folder of sbatch
--open-mode=append # a job that is queued again continues its log
partition? --partition={partition} # the queue
account? --account={account} # the account that pays
"""
PBS = """\
-N mpitrain # the name in qstat
-l select={nodes}:ncpus={cores_per_node}:mpiprocs={ranks_per_node}{ngpus} # hosts, and of each its cores, ranks and GPUs
-l place=scatter:excl # each chunk on a host of its own, without other jobs
-l walltime={clock} # PBS ends the job then
-j oe # one log for both streams
-r {rerun} # whether PBS may run the job again after a failed host
runs? -J 0-{last} # one task for each run
partition? -q {partition} # the queue
account? -A {account} # the account that pays
"""
LSF = """\
one? -J "mpitrain" # the name in bjobs
runs? -J "mpitrain[1-{runs}]" # the name in bjobs, one task for each run
-n {ranks} # ranks of the job
-R "span[ptile={ranks_per_node}]" # ranks of each host
-R "affinity[core({cores_per_rank})]" # cores of each rank
-x # whole hosts: no other job slows a rank
-W {clock:.5} # LSF ends the job then
one? -o mpitrain-%J.out # the log; LSF appends
runs? -o mpitrain-%J_%I.out # the log; LSF appends
gpus_per_node? -gpu "num={gpus_per_node}:mode=shared" # GPUs of each host; each rank sees all
resumes? -Q "85" # LSF queues the job again if it ends with 85: stopped after a checkpoint
partition? -q {partition} # the queue
account? -P {account} # the project that pays
"""
REQUEUE = r"""
  scontrol requeue "$SLURM_JOB_ID" && exit
  # Where the site forbids a requeue, a second job goes on when this one has left.
  next=$(sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" --export="ALL,MPITRAIN_JOB=$job" \
    ${SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID} --partition="$SLURM_JOB_PARTITION" \
    --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" "$0" "$@") &&
    echo "job $next continues $run"
"""
# PBS has no array of one index and no dependency on a task: steps of 2, and the whole array.
RESUBMIT = r"""
  export MPITRAIN_JOB=$job MPITRAIN_ARGS=${1+$(printf '%q ' "$@")}
  # The next job gets the whole environment; where the site forbids -V, variable by variable.
  for all in -V "-v $(compgen -e | paste -sd,)"; do
    next=$(qsub $all -W depend=afterany:"${PBS_JOBID/\[*\]/[]}" \
      ${PBS_ARRAY_INDEX:+-J $PBS_ARRAY_INDEX-$((PBS_ARRAY_INDEX + 1)):2} "$0") &&
      echo "job $next continues $run" && break
  done
"""

SYSTEMS = {
    "slurm": ScriptSystem(
        submit="sbatch",
        prefix="#SBATCH",
        directives=SLURM,
        folder="SLURM_SUBMIT_DIR",
        job="SLURM_JOB_ID",
        array="SLURM_ARRAY_JOB_ID",
        task="SLURM_ARRAY_TASK_ID",
        first_task=0,
        again=REQUEUE,
        stopped=85,
    ),
    "pbs": ScriptSystem(
        submit="qsub",
        prefix="#PBS",
        directives=PBS,
        folder="PBS_O_WORKDIR",
        job="PBS_JOBID",
        array="PBS_ARRAY_ID",
        task="PBS_ARRAY_INDEX",
        first_task=0,
        again=RESUBMIT,
        stopped=85,
    ),
    "lsf": ScriptSystem(
        submit="bsub <",
        prefix="#BSUB",
        directives=LSF,
        folder="LS_SUBCWD",
        job="LSB_JOBID",
        array="LSB_JOBID",
        task="LSB_JOBINDEX",
        first_task=1,
        again="",
        stopped=143,
    ),
}
"""{option of `mpitrain slurm`: batch system}."""
