"""Batch scripts: the request (command, ranks, time), the batch systems, and the script of each."""

import re
import shlex
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError

DAY = 86_400
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


class BatchJob(NamedTuple):
    """A batch job, as the command line describes it.

    words           the mpitrain command, with its arguments
    ranks_per_node  ranks that the batch system starts on each node
    cores_per_rank  0: the ranks of a node divide all its cores
    seconds         time limit
    margin          seconds before the limit at which the script asks the run to stop
    by              the launcher: srun or mpirun
    environment     kind, a colon and a value: venv:PATH, module:NAMES or apptainer:IMAGE
    sweep           for each task of an array: the settings of its run
    extra           further options of the batch system, each for a line of its own
    written_by      the command line that repeats the script
    """

    words: list[str]
    nodes: int
    ranks_per_node: int
    cores_per_rank: int
    gpus_per_node: int
    seconds: int
    margin: int
    partition: str
    account: str
    by: str
    environment: str
    sweep: list[list[str]]
    extra: list[str]
    written_by: str

    @property
    def warning(self) -> int:
        """Seconds before the limit at which the script warns the run: a quarter of it at most."""
        return max(30, min(self.margin, self.seconds // 4))

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit as Slurm writes it; ConfigError if it is none.

    The forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
    """
    match = TIME.fullmatch(time)
    if not match:
        raise _wrong(time)
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"]:
        seconds = int(match["days"]) * DAY + first * 3600 + second * 60 + third
    elif match["third"]:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    if not 60 <= seconds < 1000 * DAY:
        raise _wrong(time)
    return seconds


def _wrong(time: str) -> ConfigError:
    return ConfigError(
        f"--time is a time from 1 minute to 999 days, but {time!r}.",
        "Write minutes (90), H:M:S (1:30:00) or D-H:M:S (1-12:00:00).",
    )


def clock(seconds: int) -> str:
    """Return a time limit as H:M:S with two digits each; Slurm and PBS read it."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def grid(options: tuple[str, ...]) -> list[list[str]]:
    """Return the settings of each run of a sweep over all combinations of KEY=VALUE,VALUE,...

    raises  ConfigError if an option names no key, one twice, one value, or a value with a space
    """
    axes, keys = [], set[str]()
    for option in options:
        key, sign, values = option.partition("=")
        listed = values.split(",")
        if not sign or "." not in key or not all(listed) or len({*listed}) < 2:
            raise ConfigError(
                f"A sweep has a key and at least two different values, but --sweep is {option!r}.",
                "For example: --sweep optimizer.lr=0.001,0.002,0.004",
            )
        if re.search(r"[^\w.:+/=-]", key + values.replace(",", "")):
            raise ConfigError(
                f"The values of a sweep are words without spaces or quotes, but --sweep is {option!r}.",
                "Write a TOML file for each such value, and submit a job for each.",
            )
        if key in keys:
            raise ConfigError(
                f"Each --sweep has a key of its own, but {key} has two.",
                f"Name all its values at once: --sweep {key}=A,B,C",
            )
        keys.add(key)
        axes.append([f"{key}={value}" for value in listed])
    return [list(settings) for settings in product(*axes)] if axes else []


def environment_of(request: BatchJob) -> list[str]:
    """Return the lines for the kind of environment that the request names.

    They set the bash array `start`: the words before the command of a rank. Lines of the other
    kinds are comments, ready to be used.

    raises  ConfigError for an unknown kind, or a value that a script cannot contain
    """
    kind, _, value = request.environment.partition(":")
    if kind not in ENVIRONMENTS:
        raise ConfigError(
            f"--env is {', '.join(ENVIRONMENTS)}, with a value after a colon, but {request.environment!r}.",
            "For example: --env venv:/home/me/.venv, --env module:openmpi/5.0, --env apptainer:mpitrain.sif",
        )
    if set(value) & set("'\"`$\\\n"):
        raise ConfigError(
            f"The value of --env has no quotes, dollar signs or backslashes, but {value!r}.",
            "Rename the path, or edit the script.",
        )
    return ENVIRONMENTS[kind](request, value)


def _venv(request: BatchJob, value: str) -> list[str]:
    return [
        _launch(request),
        *_container(request, "mpitrain.sif", comment="#"),
        "#module load openmpi  # the MPI of the site, if mpi4py was built with it",
        *_activate(value),
    ]


def _module(request: BatchJob, value: str) -> list[str]:
    names = value.replace(",", " ") or "openmpi"
    return [
        _launch(request),
        *_container(request, "mpitrain.sif", comment="#"),
        f"module load {names}  # the MPI of the site, with which mpi4py was built",
        *_activate(""),
    ]


def _apptainer(request: BatchJob, value: str) -> list[str]:
    return [
        *_container(request, value or "mpitrain.sif", comment=""),
        "#module load mpich  # the MPI of the site, of the same family as that in the image",
    ]


ENVIRONMENTS: dict[str, Callable[[BatchJob, str], list[str]]] = {
    "venv": _venv,
    "module": _module,
    "apptainer": _apptainer,
}


def _launch(request: BatchJob) -> str:
    return f"start=(mpitrain launch --launcher {request.by} --)"


def _activate(path: str) -> list[str]:
    venv = f'"{path}"' if path else "${MPITRAIN_VENV:-${VIRTUAL_ENV:-$PWD/.venv}}"
    wrong = '[ -n "$MPITRAIN_VENV" ] && [ ! -x "$MPITRAIN_VENV/bin/mpitrain" ] || '
    return [
        f"venv={venv}",
        '[ -e "$venv/bin/activate" ] && source "$venv/bin/activate"',
        f"if {'' if path else wrong}! command -v mpitrain >/dev/null; then",
        '  echo "no mpitrain in $venv. Name its environment as MPITRAIN_VENV=/path/to/.venv" >&2',
        "  exit 2",
        "fi",
    ]


def _container(request: BatchJob, image: str, comment: str) -> list[str]:
    """Return the lines that start ranks in a container; launch would need mpitrain outside of it."""
    gpus = "--nv " if request.gpus_per_node else ""
    # MPICH in the image takes PMI-2 alone. srun binds a rank to one core if it gets no number of
    # cores, and waits for the other ranks if one fails before it is connected.
    cores = request.cores_per_rank or "$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))"
    ranks, mpi = (
        (f"srun --mpi=pmi2 --cpus-per-task={cores} --wait=60", "MPICH; Open MPI: --mpi=pmix")
        if request.by == "srun"
        else (f'mpirun -n "${{SLURM_NTASKS:-{request.ranks}}}"', "the MPI of mpirun")
    )
    inside = f'apptainer exec {gpus}--bind "$PWD" "{image}"'
    return [
        f"{comment}start=({ranks} {inside} mpitrain)  # instead: an image with mpitrain and {mpi}",
        f'{comment}mpitrain() {{ {inside} mpitrain "$@"; }}',
    ]


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

REASON_COLUMN = 38
"""The column at which the comment of an #SBATCH line begins."""
ARGUMENTS = """\
# Arguments that the system does not pass to a script: MPITRAIN_ARGS="--set run.steps=100"
[ $# != 0 ] || eval "set -- $MPITRAIN_ARGS" || exit 2
"""


def script(request: BatchJob, name: str) -> str:
    """Return the script of a request for the batch system of this name."""
    system = SYSTEMS[name]
    kind = _kind(request)
    body = BODIES.get(kind, _other)(request, system)
    untried = (
        []
        if system.is_slurm
        else [f"Not run on a real {name.upper()}: read it before you submit it."]
    )
    if request.environment.startswith("apptainer"):
        untried.append("Not run with a real Apptainer.")
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"# {line}" for line in [*untried, *_title(request, kind)]),
            f"# Written by: {request.written_by}",
            *_directives(system, request, kind in RESUMES),
            f'cd "${{{system.folder}:-.}}" || exit  # the batch system runs a copy of this script in a folder of its own',
            "",
            *environment_of(request),
            "",
            *([] if system.is_slurm else [ARGUMENTS]),
            *body,
            "",
        ]
    )


def _kind(request: BatchJob) -> str:
    if request.sweep:
        return "sweep"
    return request.words[0]


def _title(request: BatchJob, kind: str) -> list[str]:
    size = f"{request.nodes} host(s) with {request.ranks_per_node} rank(s) each"
    return TITLES.get(kind, _runs)(request, size)


def _trains(request: BatchJob, size: str) -> list[str]:
    return [
        f"Train on {size}. Near its time limit the run saves a checkpoint and stops with exit code 85.",
        "The job then queues itself again, and the run resumes.",
        *_cancelled(request),
    ]


def _sweeps(request: BatchJob, size: str) -> list[str]:
    return [
        f"Train {len(request.sweep)} runs with other settings, each on {size}. Each has a directory below runs/sweep-JOB.",
        "The last one to end draws the losses of all in runs/sweep-JOB.png (needs mpitrain[report]).",
        *_cancelled(request),
    ]


def _cancelled(request: BatchJob) -> list[str]:
    if request.by == "srun":
        return [
            "A cancelled run saves a checkpoint, too. To go on, submit the script with --out and the old run directory."
        ]
    return [
        "A cancelled job ends at once: the batch system ends the ranks of the other hosts. Such a run goes on from its last",
        "periodic checkpoint (checkpoint.every). To go on, submit the script with --out and the old run directory.",
    ]


def _measures(request: BatchJob, size: str) -> list[str]:
    return [f"Measure on {size}. The name of the JSON file has the number of the job."]


def _runs(request: BatchJob, size: str) -> list[str]:
    return [f"Run {request.words[0]} on {size}. The log has its output."]


TITLES: dict[str, Callable[[BatchJob, str], list[str]]] = {
    "train": _trains,
    "sweep": _sweeps,
    "bench": _measures,
}


def _directives(system: ScriptSystem, request: BatchJob, resumes: bool) -> list[str]:
    lines = []
    for option, reason in directives(system, request, resumes):
        if system.is_slurm:
            lines.append(f"{f'{system.prefix} {option}':<{REASON_COLUMN}}  # {reason}")
        else:
            lines += [f"# {reason}:", f"{system.prefix} {option}"]
    return lines


def _train(request: BatchJob, system: ScriptSystem) -> list[str]:
    words, run = request.words, f'"runs/{_name(system)}-$job"'
    if named := _value(words, "--out"):
        words, run = _without(words, "--out"), shlex.quote(named)
    return [
        f"job=${{MPITRAIN_JOB:-${system.job}}}  # the first job of this run",
        f"run={run}",
        *_supervised(request, system, [shlex.join(words), '--out "$run"', *_resume(words), '"$@"']),
        *_again(system),
    ]


def _sweep(request: BatchJob, system: ScriptSystem) -> list[str]:
    rows = [f"  '{' '.join(settings)}'" for settings in request.sweep]
    index = f"${system.task}" + (f" - {system.first_task}" if system.first_task else "")
    return [
        f"job=${{MPITRAIN_JOB:-${system.array}}}  # the first array of this sweep",
        "job=${job%%[*}",
        "sweep=(",
        *rows,
        ")",
        f"settings=${{sweep[{index}]}}",
        "name=${settings// /,}",
        "run=runs/sweep-$job/${name//\\//_}",
        'read -ra settings <<< "$settings"',
        *_supervised(
            request,
            system,
            [
                shlex.join(request.words),
                '"${settings[@]/#/--set=}"',
                '--out "$run"',
                *_resume(request.words),
                '"$@"',
            ],
        ),
        "if [ $rc = 0 ]; then",
        "  ended=(runs/sweep-$job/*/metrics.jsonl)",
        '  if [ "$(grep -l \'"event": "end"\' "${ended[@]}" | wc -l)" = ${#sweep[@]} ] &&',
        "    mkdir runs/sweep-$job/.drawn 2>/dev/null; then  # two tasks may end at once",
        '    mpitrain runs plot "${ended[@]%/metrics.jsonl}" --out "runs/sweep-$job.png"',
        "  fi",
        "fi",
        *_again(system),
    ]


def _bench(request: BatchJob, system: ScriptSystem) -> list[str]:
    words = [shlex.join(request.words)]
    if not _value(request.words, "--json") and request.words[1:2] != ["launch"]:
        words.append(f'--json "{"-".join(request.words[:2])}-${system.job}.json"')
    return [f'"${{start[@]}}" {" ".join(words)} "$@"']


def _other(request: BatchJob, system: ScriptSystem) -> list[str]:
    return [f'"${{start[@]}}" {shlex.join(request.words)} "$@"']


BODIES: dict[str, Callable[[BatchJob, ScriptSystem], list[str]]] = {
    "train": _train,
    "sweep": _sweep,
    "bench": _bench,
}
RESUMES = {"train", "sweep"}


def _name(system: ScriptSystem) -> str:
    return next(name for name, row in SYSTEMS.items() if row is system)


def _supervised(request: BatchJob, system: ScriptSystem, words: list[str]) -> list[str]:
    term = "" if request.by == "srun" else "; kill -USR1 $P"
    why = (
        "cancelled or preempted: Slurm sends TERM to the ranks itself; this shell only stays alive"
        if request.by == "srun"
        else "cancelled or preempted"
    )
    timer = [
        "# This warning comes from the script, since the system sends none:",
        f"{{ while ((SECONDS < {request.seconds - request.warning})); do sleep 1; done; kill -USR1 $$; }} & timer=$!",
    ]
    return [
        "trap 'kill -USR1 $P' USR1  # the time limit is near: launch and srun pass USR1 on to every rank",
        f"trap 'cancelled=1{term}' TERM  # {why}",
        *([] if system.is_slurm else timer),
        f'"${{start[@]}}" {" ".join(words)} & P=$!',
        "while kill -0 $P 2>/dev/null; do wait $P; done  # a trapped signal ends `wait` early",
        "wait $P; rc=$?  # the shell remembers the exit code of a child",
        *([] if system.is_slurm else ["kill $timer"]),
        'echo "the run in $run ended with $rc"',
    ]


def _again(system: ScriptSystem) -> list[str]:
    """Return the lines that run the job again if the run was stopped, but not if it was cancelled."""
    if not system.again:
        return [f'[ $rc = 85 ] && [ -n "$cancelled" ] && exit {system.stopped}', "exit $rc"]
    return [
        'if [ $rc = 85 ] && [ -z "$cancelled" ]; then',
        "  trap '' USR1 TERM",
        system.again.strip("\n"),
        "fi",
        "exit $rc",
    ]


def _resume(words: list[str]) -> list[str]:
    has = any(word.partition("=")[0] == "--resume" for word in words)
    return [] if has else ["--resume=auto"]


def _value(words: list[str], option: str) -> str:
    value = ""
    for number, word in enumerate(words):
        if word == option and number + 1 < len(words):
            value = words[number + 1]
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def _without(words: list[str], option: str) -> list[str]:
    rest, skips = [], False
    for word in words:
        if skips or word == option or word.startswith(f"{option}="):
            skips = word == option and not skips
        else:
            rest.append(word)
    return rest
