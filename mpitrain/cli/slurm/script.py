"""Batch scripts: what a job shall run, the batch systems, and the script for each of them."""

import re
import shlex
from itertools import product
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from mpitrain.cli.launch.program import program
from mpitrain.errors import ConfigError

DAY = 86_400
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


class BatchJob(NamedTuple):
    """A batch job, as the command line describes it.

    words           the mpitrain command with its arguments, or the command line of a user's program
    is_program      whether it is a user's program
    checkpoint      file or folder that grows where the program has made progress; "": none is named
    ranks_per_node  ranks that the batch system starts on each node
    spares          how many of these ranks wait for the place of one that dies
    cores_per_rank  0: the ranks of a node divide all its cores
    seconds         time limit
    margin          seconds before the limit at which the script asks the run to stop
    by              the launcher: srun or mpirun
    environment     kind, a colon and a value: venv:PATH, module:NAMES or apptainer:IMAGE
    sweep           for each task of an array: the settings of its run
    extra           further options of the batch system, each written on a line of its own
    written_by      the command line that writes the same script again
    """

    words: list[str]
    is_program: bool
    checkpoint: str
    nodes: int
    ranks_per_node: int
    spares: int
    cores_per_rank: int
    gpus_per_node: int
    seconds: int
    margin: int
    partition: str
    account: str
    by: str
    environment: str
    sweep: list[list[str]]
    extra: tuple[str, ...]
    written_by: str

    @property
    def goes_on(self) -> bool:
        """Whether the job queues itself again when it exits with 85."""
        return self.is_program or self.words[0] == "train"

    @property
    def warning(self) -> int:
        """Seconds before the limit at which the script warns the run: at most a quarter of it."""
        return max(30, min(self.margin, self.seconds // 4))

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit that is written as for Slurm.

    The forms are M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.

    raises  ConfigError for any other text
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
    """Return a time limit as HH:MM:SS, which Slurm and PBS read."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def grid(options: tuple[str, ...]) -> list[list[str]]:
    """Return the settings of each run of a sweep over all combinations of KEY=VALUE,VALUE,...

    raises  ConfigError if an option has no key, a single value, or a value with a space, and if two
            options have the same key
    """
    axes, keys = [], set[str]()
    for option in options:
        key, sign, values = option.partition("=")
        listed = values.split(",")
        if not sign or not key[:1].isalpha() or not all(listed) or len({*listed}) < 2:
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


class ScriptSystem(NamedTuple):
    """How a batch system runs scripts.

    submit       the shell command that submits a script
    folder       variable of the folder in which the job was submitted
    job          variable of the job's number
    array, task  variables of an array's number, and of a task's index
    first_task   index of the first task
    """

    submit: str
    folder: str
    job: str
    array: str
    task: str
    first_task: int


SYSTEMS = {
    "slurm": ScriptSystem(
        "sbatch", "SLURM_SUBMIT_DIR", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", 0
    ),
    "pbs": ScriptSystem("qsub", "PBS_O_WORKDIR", "PBS_JOBID", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX", 0),
    "lsf": ScriptSystem("bsub <", "LS_SUBCWD", "LSB_JOBID", "LSB_JOBID", "LSB_JOBINDEX", 1),
}
"""{option of `mpitrain slurm`: batch system}."""

ENVIRONMENTS = ("venv", "module", "apptainer")
TEMPLATE = Path(__file__).with_name("batch.template")
LINE = re.compile(r"^([\w !.]*)\| (.*)$", re.MULTILINE)
REASON_COLUMN = 38
"""The column at which the comment of an #SBATCH line begins."""


class _Text(Template):
    """Text in which @{name} stands for a fact, because $ belongs to the shell."""

    delimiter = "@"


def script(request: BatchJob, name: str) -> str:
    """Return the script of a job for the batch system of this name.

    raises  ConfigError for an unknown kind of environment, for a value of it that a script cannot
            contain, and if a number that the system needs is missing
    """
    facts = _facts(request, name)
    kind = facts["kind"]
    holds = {
        *(name, kind, request.by, facts["environment"]),
        *(["trains"] if kind in ("train", "sweep") else []),
        *(["resumes"] if request.goes_on else []),
        *(word for word, fact in CONDITIONS.items() if facts[fact]),
    }
    # An option of sbatch that is given takes the place of the script's own.
    replaced = [f"#SBATCH {option.partition('=')[0]}" for option in request.extra]
    lines = []
    for conditions, text in LINE.findall(TEMPLATE.read_text()):
        words = conditions.split()
        lists = [word[1:] for word in words if word[0] == "."]
        if any((word.lstrip("!") in holds) is (word[0] == "!") for word in words if word[0] != "."):
            continue
        option = re.match(r"#SBATCH --[\w-]+", text)
        if option and option[0] in replaced:
            continue
        for item in facts[lists[0]] if lists else [""]:
            line, _, reason = text.partition("@{c}")
            line = _Text(line).substitute(facts, item=item)
            lines.append(f"{line:<{REASON_COLUMN}}  # {reason}" if reason else line)
    return "\n".join([*lines, ""])


CONDITIONS = {
    "cores": "cores_per_rank",
    "gpus": "gpus_per_node",
    "partition": "partition",
    "account": "account",
    "path": "path",
    "array": "runs",
    "checkpoint": "checkpoint",
}
"""{condition of a line of the template: the fact that is not 0 or empty}."""


def _facts(request: BatchJob, name: str) -> dict[str, Any]:
    """Return {name in the template: value} of a job."""
    r, system = request, SYSTEMS[name]
    environment, value = _environment(request.environment)
    if name != "slurm" and not r.cores_per_rank:
        raise ConfigError(
            f"{name.upper()} needs the number of cores of a rank, but --cores-per-rank is not given.",
            "Divide the cores of a node by --ranks-per-node.",
        )
    words = r.words
    if r.is_program:
        kind = "program"
        if environment == "apptainer":
            words = ["python", *program(words).words[1:]]
    else:
        kind = "sweep" if r.sweep else words[0] if words[0] in ("train", "bench") else "other"
    named = _value(words, "--out") if kind == "train" else ""
    has_json = _value(words, "--json")
    # MPICH in an image takes PMI-2 alone. srun binds a rank to one core if it gets no number of
    # cores, and waits for the other ranks if one fails before it is connected.
    image = value if environment == "apptainer" else ""
    inside = f'apptainer exec {"--nv " if r.gpus_per_node else ""}--bind "$PWD" "{image or "mpitrain.sif"}"'
    return {
        **r._asdict(),
        **system._asdict(),
        "kind": kind,
        "environment": environment,
        "size": f"{r.nodes} host(s) with {r.ranks_per_node} rank(s) each",
        "command": r.words[0],
        "words": shlex.join(_without(words, "--out") if named else words),
        "run": shlex.quote(named or shlex.join(r.words))
        if named or r.is_program
        else f'"runs/{name}-$job"',
        "checkpoint": r.checkpoint and shlex.quote(r.checkpoint),
        "json": "" if has_json else f' --json "{"-".join(r.words[:2])}-${system.job}.json"',
        "resume": ""
        if any(word.partition("=")[0] == "--resume" for word in r.words)
        else " --resume=auto",
        "ranks": r.ranks,
        "waiting": f" --spares {r.spares} --fault-tolerant" * bool(r.spares),
        "cores_per_node": r.cores_per_rank * r.ranks_per_node,
        "cores": r.cores_per_rank or "$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))",
        "clock": clock(r.seconds),
        "hours_minutes": clock(r.seconds)[:5],
        "warning": r.warning,
        "patience": r.seconds - r.warning,
        "runs": len(r.sweep),
        "last": len(r.sweep) - 1,
        "settings": [" ".join(settings) for settings in r.sweep],
        "index": f"${system.task}" + (f" - {system.first_task}" if system.first_task else ""),
        "off": "" if environment == "apptainer" else "#",
        "inside": inside,
        "modules": value.replace(",", " ") or "openmpi",
        "path": value if environment == "venv" else "",
    }


def _environment(text: str) -> tuple[str, str]:
    """Return kind and value of --env."""
    kind, _, value = text.partition(":")
    if kind not in ENVIRONMENTS:
        raise ConfigError(
            f"--env is {', '.join(ENVIRONMENTS)}, with a value after a colon, but {text!r}.",
            "For example: --env venv:/home/me/.venv, --env module:openmpi/5.0, --env apptainer:mpitrain.sif",
        )
    if set(value) & set("'\"`$\\\n"):
        raise ConfigError(
            f"The value of --env has no quotes, dollar signs or backslashes, but {value!r}.",
            "Rename the path, or edit the script.",
        )
    return kind, value


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
