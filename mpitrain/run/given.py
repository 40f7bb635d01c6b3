"""The first agreement of a start: all ranks have the same configuration, as it was given."""

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from mpitrain.config import Config
from mpitrain.data import beside, source_kind
from mpitrain.machine import process
from mpitrain.transport.agreement import check_same, from_all_ranks
from mpitrain.transport.base import Transport


class RunLocation(NamedTuple):
    """The location of a run, as rank 0 found it; serialisable as JSON.

    folder    the run directory; empty for a new one under runs/, which gets its name in `claim`
    saved     the checkpoint to resume from, or empty
    has_run   whether the folder holds a run
    changed   keys with other values than in the resumed run: {key: [then, now]}
    held_out  the data.validation of the resumed run, if the source is the same and the
              configuration names no other; else empty
    largest   the largest token of data.source, if the run has noted it since the last change of
              the file; else None
    """

    folder: str = ""
    saved: str = ""
    has_run: bool = False
    changed: dict[str, list[Any]] = {}
    held_out: str = ""
    largest: int | None = None


class Given(NamedTuple):
    """A configuration on which all ranks agree, before it is resolved.

    config    from `parse`; rank 0 has replaced an empty data.validation
    gpus      the GPU of each rank, by rank; none where device.kind needs none
    run       a random identity, for a run that resumes no checkpoint
    location  the run directory and the checkpoint to resume from, as rank 0 found them
    """

    config: Config
    gpus: list[process.Gpu]
    run: str
    location: RunLocation


def agree_on(
    transport: Transport,
    configured: Callable[[], Config],
    look: Callable[[Config], RunLocation | None] = lambda config: RunLocation(),
) -> Given:
    """Agree on the configuration as it was given; collective, in one gather.

    configured  returns this rank's configuration
    look        returns the location of the run; that of rank 0 counts
    raises      MpitrainError on every rank, if `configured` or `look` raises it on any rank;
                ConfigError on every rank, if configurations differ
    """
    configs: list[Config] = []

    def record() -> list[Any]:
        configs.append(config := configured())
        source = config.data.source
        return [
            config.flat(),
            process.current_gpu() if config.device.kind in ("auto", "cuda") else process.Gpu(),
            uuid4().hex,
            look(config),
            beside(source) if source_kind(source).is_token_file else "",
        ]

    everyone = from_all_ranks(transport, record)
    flats, gpus, runs, places, validations = zip(*everyone, strict=True)
    check_same("configuration", flats, transport.hosts)
    (config,), location = configs, RunLocation(*places[0])
    validation = location.held_out or config.data.validation or validations[0]
    data = config.data.model_copy(update={"validation": validation})
    config = config.model_copy(update={"data": data})
    return Given(config, [process.Gpu(*gpu) for gpu in gpus], runs[0], location)
