"""The lines of a batch script that make mpitrain available: modules, a virtual environment, Apptainer."""

from collections.abc import Callable

from mpitrain.cli.slurm.request import BatchJob
from mpitrain.errors import ConfigError


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
