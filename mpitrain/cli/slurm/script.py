"""The text of a batch script: its head, its environment, and the lines of its kind of job."""

import shlex
from collections.abc import Callable

from mpitrain.cli.slurm.environments import environment_of
from mpitrain.cli.slurm.request import BatchJob
from mpitrain.cli.slurm.systems import SYSTEMS, ScriptSystem, directives

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
