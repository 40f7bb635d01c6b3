"""The request for a batch job: its command, ranks, time and environment."""

import re
from itertools import product
from typing import NamedTuple

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
