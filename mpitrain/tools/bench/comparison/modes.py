"""Words of `mpitrain compare`: some, joined by +, stand for settings of a job."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.collectives.selection.table import choices
from mpitrain.config import Config, with_settings
from mpitrain.config.plugins import load
from mpitrain.errors import ConfigError
from mpitrain.parallel.grid import divisor
from mpitrain.parallel.modes import MODES, ZERO
from mpitrain.run.build import build
from mpitrain.run.choices import ALGORITHMS, parse
from mpitrain.run.job import axes, resolve_here, with_hyper_parameters
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

WARM_UP = 1
"""Steps that are not timed: the first one allocates buffers."""
RING = "replication.algorithm=ring"
BASELINE = "ring"
"""The mode that changes nothing else in the job."""
COUNTED = (RING, "layout.algorithm=ring")
"""Settings that names of modes imply, and --set may replace. Rings are the default, because the transport counts
their bytes.
"""

FORMS: dict[str, tuple[str, ...]] = {
    "dpN": ("layout.dp=N",),
    "tpN": ("layout.tp=N", "layout.algorithm=ring"),
    "sequence": ("layout.sequence_parallel=true",),
    "ulyssesN": ("layout.cp=N", "layout.cp_mode=ulysses"),
    "ringN": ("layout.cp=N", "layout.cp_mode=ring"),
    "ppN": ("layout.pp=N",),
    "ppN:SCHEDULE": ("layout.pp=N", "pipeline.schedule=SCHEDULE"),
    "float64": ("precision.compute=float64",),
    "bf16": ("precision.compute=bfloat16",),
    "fp16": ("precision.compute=float16",),
    "accumulateN": ("batch.micro_batches=N",),
    "recompute": ("memory.recompute=unit",),
    "recomputeN": ("memory.recompute=N",),
    "logitsN": ("memory.logit_chunks=N",),
    "tiled": ("memory.attention=tiled",),
    "loraN": ("lora.rank=N",),
    "wire:FORMAT": ("replication.wire=FORMAT",),
    "optimizer:NAME": ("optimizer.name=NAME",),
    "no-overlap": ("replication.overlap=false",),
    "FILE.py": ("replication.algorithm=FILE.py",),
}
"""{form of a word: its settings}. N stands for an integer, another word in capitals for a name."""

JOB = "job"
"""The word for the job as it is."""
JOINED = re.compile(r"""(?<=[=\[{,: ])("[^"]*"|'[^']*')|(\+)(?!\d)""")
"""Group 2 is between two words; 1e+3 is one, and so is what stands between quotes (group 1)."""
_HOLES = re.compile(r"N(?![A-Z])|[A-Z]{2,}")


def settings_by_mode() -> dict[str, tuple[str, ...]]:
    """Return {mode of replication: its settings}.

    A mode that is not itself an all-reduce algorithm sums by a ring, unless --set names another.
    """
    return {
        **{name: (f"replication.algorithm={name}",) for name in choices("allreduce")},
        **{
            f"zero{stage}{end}": (f"replication.zero={stage}", f"replication.shard={shard}", RING)
            for end, shard in (("", "all"), ("-host", "host"))
            for stage in sorted(ZERO)
        },
        **{
            name: (f"replication.mode={name}", RING)
            for name, mode in MODES.items()
            if name != "all-reduce" and not mode.variants
        },
        **{
            f"{name}-{end}": (f"replication.mode={name}", setting, RING)
            for name, mode in MODES.items()
            for end, setting in mode.variants.items()
        },
    }


def usual() -> list[str]:
    """Return the modes that `compare` measures without settings.

    Modes with the suffix `-host` are not among them: on one host they equal those without it.
    """
    others = (mode for mode in settings_by_mode() if mode not in choices("allreduce"))
    return ["star", "ring", "auto", *(mode for mode in others if not mode.endswith("-host"))]


def settings_of(mode: str, set_keys: Collection[str] = ()) -> tuple[str, ...]:
    """Return the settings of a mode as `section.key=value`.

    mode      words and `section.key=value` joined by +, such as zero3+tp2; unless a word names an
              algorithm, they reduce by a ring, but JOB and keys alone keep that of the job
    set_keys  keys that --set names; a word does not set them to a value of COUNTED
    raises    ConfigError for an unknown word, and for words that set one key to different values
    """
    known = settings_by_mode()
    settings: dict[str, tuple[str, str]] = {}
    words = _words_of(mode, known)
    for word in words:
        for setting in () if word == JOB else _settings_of_word(word, mode, known):
            key, _, value = setting.partition("=")
            is_default = setting == RING or key in set_keys
            if setting in COUNTED and is_default and word != BASELINE and not is_of_job(word):
                continue  # Another word may replace a default.
            first, before = settings.setdefault(key, (word, value))
            if before != value:
                raise ConfigError(
                    f"Two words of a mode must not set the same key, but in {mode} {first} sets {key}={before} "
                    f"and {word} sets {key}={value}.",
                    f"Take one of {first} and {word}.",
                )
    if "replication.algorithm" not in set_keys and not all(map(is_of_job, words)):
        settings.setdefault("replication.algorithm", (BASELINE, BASELINE))
    return tuple(f"{key}={value}" for key, (_, value) in settings.items())


def is_of_job(word: str) -> bool:
    """Return whether a word is JOB or `section.key=value`."""
    return word == JOB or "=" in word


def _words_of(mode: str, known: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the words of a mode. A + in quotes, or before anything but a word, is part of a value."""
    words: list[str] = []
    places = [match.start() for match in JOINED.finditer(mode) if match[2]]
    for start, end in pairwise([-1, *places, len(mode)]):
        part = mode[start + 1 : end]
        is_word = is_of_job(part) or part in known or _form_of(part)
        if words and "=" in words[-1] and not is_word:
            words[-1] += f"+{part}"
        else:
            words.append(part)
    return words


def _settings_of_word(word: str, mode: str, known: Mapping[str, tuple[str, ...]]) -> Iterable[str]:
    return [word] if "=" in word else known.get(word) or _formed(word, mode)


def is_replication(mode: str) -> bool:
    """Return whether a mode is a single word for a mode of replication."""
    return mode in settings_by_mode()


def _formed(word: str, mode: str) -> Iterable[str]:
    if found := _form_of(word):
        form, match = found
        values = dict(zip(_HOLES.findall(form), match.groups(), strict=True))
        return [_HOLES.sub(_value_in(values), setting) for setting in FORMS[form]]
    whole = "" if word == mode else f" of {mode}"
    raise ConfigError(
        f"A setting is {JOB}, SECTION.KEY=VALUE, {', '.join([*settings_by_mode(), *FORMS])}, or several joined by +, "
        f"but this is {word!r}{whole}.",
        "Name some of these.",
    )


def _form_of(word: str) -> tuple[str, re.Match[str]] | None:
    """Return the form of a word with its match, or None if it has none."""
    for form in FORMS:
        if match := re.fullmatch(_HOLES.sub(_pattern, re.escape(form)), word):
            return form, match
    return None


def _pattern(hole: re.Match[str]) -> str:
    return r"([1-9]\d{0,8})" if hole[0] == "N" else r"([\w./:-]+)"


def _value_in(values: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda hole: values[hole[0]]


def jobs(
    modes: Sequence[str],
    settings: Sequence[str],
    hosts: Sequence[str],
    base: Mapping[str, Any] | None = None,
) -> dict[str, Config]:
    """Return {mode: its configuration}. No message is sent.

    base      tables of a configuration, which the settings change
    settings  section.key=value for all modes; a mode's own settings take precedence
    hosts     host of every rank, by rank
    raises    ConfigError if a mode does not exist or cannot run on these ranks, or if a plugin
              cannot be imported
    """
    tables = with_settings(base or {}, [*settings])
    load(tables)  # Plugins add modes.
    set_keys = {f"{section}.{key}" for section, values in tables.items() for key in values}
    own = {mode: settings_of(mode, set_keys) for mode in modes}
    if len(hosts) == 1 and all(map(is_replication, modes)):
        raise ConfigError(
            "compare measures what ranks send each other, and one rank sends nothing.",
            "mpitrain launch -n 2 -- compare",
        )
    configs, refused = {}, {}
    for mode, changes in own.items():
        try:
            configs[mode] = _job(with_settings(tables, [*changes]), hosts)
        except ConfigError as error:
            refused[mode] = error
    laws = {refusal.law for refusal in refused.values()}
    for mode, refusal in refused.items():
        if not configs and len(laws) == 1 and is_replication(mode):
            raise refusal  # The job itself is refused.
        rest = f"\nOr compare what works: {' '.join(configs)}" if configs else ""
        raise ConfigError(f"{mode}: {refusal.law}", f"{refusal.way_out}{rest}")
    return configs


def _job(tables: dict[str, Any], hosts: Sequence[str]) -> Config:
    config = parse(tables)
    if config.run.steps <= WARM_UP:
        raise ConfigError(
            f"compare needs more than {WARM_UP} step, whose time does not count, but run.steps is "
            f"{config.run.steps}.",
            "Leave run.steps to --steps.",
        )
    config = with_hyper_parameters(config)
    divisor(axes(config, len(hosts)), hosts, config.replication.shard)
    return config


def check_resolved(transport: Transport, configs: Mapping[str, Config]) -> None:
    """Raise ConfigError for a mode that does not fit these ranks. Collective.

    Otherwise a mode could be refused after others have been measured. Schedules and devices are
    checked. A job whose all-reduce is read from a file is built, which simulates that algorithm for
    each of its arrays.
    """
    for mode, config in configs.items():
        try:
            on_all_ranks(transport, partial(resolve_here, config, transport.hosts))
            if any(is_file(config.flat()[key]) for key in ALGORITHMS):
                build(transport, config).close()
        except ConfigError as error:
            if not error.agreed:
                raise
            raise ConfigError(f"{mode}: {error.law}", error.way_out).on_every_rank() from None
