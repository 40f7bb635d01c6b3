"""The batch systems: their directives, variables, and the way to run a stopped job again."""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.cli.slurm.request import Request, clock
from mpitrain.errors import ConfigError

Directives = list[tuple[str, str]]
"""Pairs of (option, reason) of a script's head."""


class System(NamedTuple):
    """A batch system.

    submit      the command that reads a script, and how
    prefix      the start of a directive's line
    has_reasons_in_line   whether a line may end with its reason; else the reason is a comment above
    directives  (request, whether the job resumes) -> the head of a script
    folder      variable of the folder in which the job was submitted
    job         variable of the job's number
    array, task variables of an array's number, and of a task's index
    first_task  index of the first task
    warns       whether the system itself sends USR1 before the time limit
    again       lines that run a stopped job again, indented; empty: the system does so by itself
    stopped     exit code of a job that was cancelled after a checkpoint
    tried       whether scripts ran on a real one
    """

    submit: str
    prefix: str
    has_reasons_in_line: bool
    directives: Callable[[Request, bool], Directives]
    folder: str
    job: str
    array: str
    task: str
    first_task: int
    warns: bool
    again: tuple[str, ...]
    stopped: int
    tried: bool


def _slurm(request: Request, resumes: bool) -> Directives:
    r = request
    gpus = "one rank per GPU" if r.gpus_per_node else "one rank per socket is a good start"
    found: Directives = [
        ("--job-name=mpitrain", "the name in squeue"),
        (f"--nodes={r.nodes}", "hosts"),
        (f"--ntasks-per-node={r.ranks_per_node}", f"ranks of each host: {gpus}"),
    ]
    if r.cores_per_rank:
        found.append(
            (f"--cpus-per-task={r.cores_per_rank}", "cores of each rank, a thread on each")
        )
    else:
        found.append(
            ("--exclusive", "whole hosts: no other job slows a rank, and ranks divide all cores")
        )
    if r.gpus_per_node:
        reason = "GPUs of each host; rank i takes GPU i. With --gpus-per-task no rank would see the memory of another"
        found.append((f"--gpus-per-node={r.gpus_per_node}", reason))
    found.append(
        (f"--time={clock(r.seconds)}", "Slurm ends the job then; shorter jobs start earlier")
    )
    if resumes:
        found += [
            (
                f"--signal=B:USR1@{r.warning}",
                "a second warning; the run asks squeue for the end of the job itself",
            ),
            ("--requeue", "Slurm may queue the job again, under the same number"),
        ]
    if r.sweep:
        found.append(
            (
                f"--array=0-{len(r.sweep) - 1}",
                "one task for each run; %4 at the end: four at a time",
            )
        )
        found.append(("--output=%x-%A_%a.out", "the log of each task"))
    else:
        found.append(("--output=%x-%j.out", "the log, in the folder of sbatch"))
    found.append(("--open-mode=append", "a job that is queued again continues its log"))
    if r.partition:
        found.append((f"--partition={r.partition}", "the queue"))
    if r.account:
        found.append(("--account=" + r.account, "the account that pays"))
    return found + [(option, "as given with --with") for option in r.extra]


def _pbs(request: Request, resumes: bool) -> Directives:
    r = request
    cores = _cores(r, "PBS") * r.ranks_per_node
    gpus = f":ngpus={r.gpus_per_node}" if r.gpus_per_node else ""
    found: Directives = [
        ("-N mpitrain", "the name in qstat"),
        (
            f"-l select={r.nodes}:ncpus={cores}:mpiprocs={r.ranks_per_node}{gpus}",
            "hosts, and of each its cores, ranks and GPUs",
        ),
        ("-l place=scatter:excl", "each chunk on a host of its own, without other jobs"),
        (f"-l walltime={clock(r.seconds)}", "PBS ends the job then"),
        ("-j oe", "one log for both streams"),
        ("-r y" if resumes else "-r n", "whether PBS may run the job again after a failed host"),
    ]
    if r.sweep:
        found.append((f"-J 0-{len(r.sweep) - 1}", "one task for each run"))
    if r.partition:
        found.append((f"-q {r.partition}", "the queue"))
    if r.account:
        found.append((f"-A {r.account}", "the account that pays"))
    return found + [(option, "as given with --with") for option in r.extra]


def _lsf(request: Request, resumes: bool) -> Directives:
    r = request
    tasks = f"[1-{len(r.sweep)}]" if r.sweep else ""
    found: Directives = [
        (
            f'-J "mpitrain{tasks}"',
            "the name in bjobs" + (", one task for each run" if tasks else ""),
        ),
        (f"-n {r.ranks}", "ranks of the job"),
        (f'-R "span[ptile={r.ranks_per_node}]"', "ranks of each host"),
        (f'-R "affinity[core({_cores(r, "LSF")})]"', "cores of each rank"),
        ("-x", "whole hosts: no other job slows a rank"),
        (f"-W {r.seconds // 3600:02d}:{r.seconds % 3600 // 60:02d}", "LSF ends the job then"),
        (f"-o mpitrain-%J{'_%I' if r.sweep else ''}.out", "the log; LSF appends"),
    ]
    if r.gpus_per_node:
        found.append(
            (f'-gpu "num={r.gpus_per_node}:mode=shared"', "GPUs of each host; each rank sees all")
        )
    if resumes:
        found.append(
            ('-Q "85"', "LSF queues the job again if it ends with 85: stopped after a checkpoint")
        )
    if r.partition:
        found.append((f"-q {r.partition}", "the queue"))
    if r.account:
        found.append((f"-P {r.account}", "the project that pays"))
    return found + [(option, "as given with --with") for option in r.extra]


def _cores(request: Request, system: str) -> int:
    if not request.cores_per_rank:
        raise ConfigError(
            f"{system} needs the number of cores of a rank, but --cores-per-rank is not given.",
            "Divide the cores of a node by --ranks-per-node.",
        )
    return request.cores_per_rank


_REQUEUE = (
    '  scontrol requeue "$SLURM_JOB_ID" && exit',
    "  # Where the site forbids a requeue, a second job goes on when this one has left.",
    '  next=$(sbatch --parsable --dependency=afterany:"$SLURM_JOB_ID" --export="ALL,MPITRAIN_JOB=$job" \\',
    '    ${SLURM_ARRAY_TASK_ID:+--array=$SLURM_ARRAY_TASK_ID} --partition="$SLURM_JOB_PARTITION" \\',
    '    --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" "$0" "$@") &&',
    '    echo "job $next continues $run"',
)
_DEPENDENT = (
    '  next=$(qsub -W depend=afterany:"$PBS_JOBID" -v MPITRAIN_JOB="$job" "$0") && echo "job $next continues $run"',
)

SYSTEMS = {
    "slurm": System(
        submit="sbatch",
        prefix="#SBATCH",
        has_reasons_in_line=True,
        directives=_slurm,
        folder="SLURM_SUBMIT_DIR",
        job="SLURM_JOB_ID",
        array="SLURM_ARRAY_JOB_ID",
        task="SLURM_ARRAY_TASK_ID",
        first_task=0,
        warns=True,
        again=_REQUEUE,
        stopped=85,
        tried=True,
    ),
    "pbs": System(
        submit="qsub",
        prefix="#PBS",
        has_reasons_in_line=False,
        directives=_pbs,
        folder="PBS_O_WORKDIR",
        job="PBS_JOBID",
        array="PBS_ARRAY_ID",
        task="PBS_ARRAY_INDEX",
        first_task=0,
        warns=False,
        again=_DEPENDENT,
        stopped=85,
        tried=False,
    ),
    "lsf": System(
        submit="bsub <",
        prefix="#BSUB",
        has_reasons_in_line=False,
        directives=_lsf,
        folder="LS_SUBCWD",
        job="LSB_JOBID",
        array="LSB_JOBID",
        task="LSB_JOBINDEX",
        first_task=1,
        warns=False,
        again=(),
        stopped=143,
        tried=False,
    ),
}
"""{option of `mpitrain slurm`: batch system}."""
