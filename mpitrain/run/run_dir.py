"""The directory of a run: found before anything is built, claimed and written once all ranks can train.

config.toml      everything resolved            metrics.jsonl   one JSON object per line
checkpoints/     see checkpoint.py              tuning.json     the tuning in use, if one was named
tiles.json       the tiles, likewise            tokens.json     what a scan of the tokens found, if there are any
lock             held by rank 0 while the run goes on    trace/      what each rank did last, see trace/ring_buffer.py
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from mpitrain.collectives.selection.tuning import tuning_text
from mpitrain.config import Config, keys, parse, read_toml
from mpitrain.data import TENTH, Scan, Source, TokenSource, Unopened, absolute, has_tokens
from mpitrain.errors import ConfigError
from mpitrain.files import Directory, cannot_write, contents, opened
from mpitrain.pipeline.schedules import NAMED
from mpitrain.run.checkpoint.directories import steps, sweep
from mpitrain.run.metrics import cut_after
from mpitrain.run.resolve import Resolved
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

METRICS, CONFIG, TUNING, TILES, TOKENS = (
    "metrics.jsonl",
    "config.toml",
    "tuning.json",
    "tiles.json",
    "tokens.json",
)
CHECKPOINTS, LOCK, TRACE = "checkpoints", "lock", "trace"
RUNS = Path("runs")  # where runs are that name no directory
WHOLE = "# All {} keys of a run of mpitrain."  # the first line of its configuration
FIXED = (
    "model.",
    "optimizer.name",
    "data.vocabulary",
)  # a checkpoint of other values of these is of another model


class RunLocation(NamedTuple):
    """Where a run will be, as rank 0 found it.

    folder   None for a fresh one under runs/, named when it is claimed
    saved    the checkpoint to go on from, or None
    has_run  whether the folder holds a run
    changed  keys that differ from the run that is resumed: {key: [then, now]}
    held_out the data.validation of the run that is resumed, if nobody has set another and its tokens are the same; else empty
    """

    folder: Path | None = None
    saved: Path | None = None
    has_run: bool = False
    changed: dict[str, list[Any]] = {}
    held_out: str = ""


def find(transport: Transport, config: Config, resume: str) -> RunLocation:
    """Look at the directory that the configuration names; collective.

    resume  "no": a directory that holds a run is refused; "yes": one that holds none is; "auto": either will do
    """

    def look() -> list[Any] | None:
        if transport.rank != 0:
            return None
        place = _look(config, resume, transport.size)
        return [str(place.folder or ""), str(place.saved or ""), *place[2:]]

    folder, saved, *rest = transport.gather_text(on_all_ranks(transport, look))[0]
    return RunLocation(Path(folder) if folder else None, Path(saved) if saved else None, *rest)


def _look(config: Config, resume: str, ranks: int) -> RunLocation:
    if not config.run.out:
        if resume != "no":
            raise ConfigError("--resume needs the directory of the run.", _how_to_resume(ranks))
        return RunLocation()
    folder = Path(config.run.out)
    saved = steps(folder / CHECKPOINTS)
    has_run = bool(saved) or is_run(folder)
    if resume == "no" and has_run:
        _check_idle(folder)
        way_on = (
            "--resume to go on with it"
            if saved
            else "--resume=auto to start it again, for it has no checkpoint"
        )
        raise ConfigError(
            f"{folder} already holds a run.", f"Add {way_on}, or choose another --out."
        )
    if resume == "yes" and not has_run:
        raise ConfigError(
            f"There is no run in {folder} to resume.",
            "Name its directory with --out, or start it with --resume=auto.",
        )
    if resume == "yes" and not saved:
        raise ConfigError(
            f"The run in {folder} ended before its first checkpoint.",
            "Start it again with --resume=auto.",
        )
    if not has_run or not saved:
        return RunLocation(folder, None, has_run)
    then = configuration(folder)
    changed = _changes(then, config)
    if fixed := [
        f"{key} {then!r} -> {now!r}"
        for key, (then, now) in changed.items()
        if key.startswith(FIXED)
    ]:
        raise ConfigError(
            f"{folder} was trained with another model: {', '.join(fixed)}.",
            "Resume with the configuration of the run, or start another one with its own --out.",
        )
    is_same = "data.source" not in changed and not config.data.validation
    return RunLocation(
        folder,
        saved[-1],
        has_run,
        changed,
        held_out_as_before(then, ())["validation"] if is_same else "",
    )


def is_run(folder: Path) -> bool:
    """Whether a directory holds the configuration of a run, be it a damaged one; what cannot be looked at holds none."""
    with contextlib.suppress(OSError), opened(folder) as run:
        return run.facts(CONFIG) is not None
    return False


def _how_to_resume(ranks: int) -> str:
    """The line that goes on with the newest run under runs/ that has a checkpoint."""
    try:
        saved = [
            (found[-1].stat().st_mtime, folder)
            for folder in RUNS.iterdir()
            if (found := steps(folder / CHECKPOINTS))
        ]
    except OSError:  # there are none, or one has just gone
        saved = []
    if not saved:
        return f"Add --out DIR; no run under {RUNS} has a checkpoint."
    start = f"mpitrain launch -n {ranks} -- train" if ranks > 1 else "mpitrain train"
    return f"To go on with the newest run under {RUNS}, type: {start} --resume --out {shlex.quote(str(max(saved)[1]))}"


def configuration(folder: Path) -> Config:
    """What a run was last trained with; ConfigError unless its file says all of it, for a default may be another value.

    A file that has as many keys as its first line says was written by a version that had no others: they began with defaults
    that change nothing.
    """
    tables = read_toml(folder / CONFIG, inner=1)
    if isinstance(tables.get("run"), dict) and "out" in tables["run"]:
        tables["run"]["out"] = (
            "."  # the folder may have got a name since that no configuration can hold
        )
    then = parse(tables, folder / CONFIG)
    missing = [
        key.name
        for key in keys()
        if key.name.split(".")[1] not in tables.get(key.name.split(".")[0], {})
    ]
    told = re.match(WHOLE.format("([0-9]{1,6})"), contents(folder / CONFIG, inner=1).decode())
    if missing and not (told and int(told[1]) == sum(map(len, tables.values()))):
        named = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise ConfigError(
            f"{folder / CONFIG} is not the whole configuration of its run: it lacks {named}.",
            "Write into it what the run was trained with, or start another run with its own --out.",
        )
    return then


def held_out_as_before(then: Config, settings: Sequence[str]) -> dict[str, Any]:
    """The table `data` of a run that goes on, or is asked, under settings: with other tokens others are held out.

    A run of a version that knew no data.validation held out the last tenth, whatever lay beside its tokens.
    """
    names = [setting.partition("=")[0].strip() for setting in settings]
    data = then.model_dump()["data"]
    if "data.source" in names:
        return {**data, "validation": ""}
    return (
        {**data, "validation": TENTH}
        if has_tokens(then.data.source) and not then.data.validation
        else data
    )


def _changes(then: Config, now: Config) -> dict[str, list[Any]]:
    old, new = then.flat(), now.flat()
    ignored: tuple[str, ...] = (
        "run.out",
        "layout.",
        "replication.tuning",
        "device.tiles",
    )  # found anew at every start
    ignored += tuple(
        key for key in ("data.vocabulary", "data.validation", "batch.micro_batches") if not new[key]
    )
    for key in ("data.source", "data.validation"):
        new[key] = absolute(new[key])  # as the folder has it
    new["pipeline.schedule"] = _schedule(new["pipeline.schedule"])
    if has_tokens(old["data.source"]):
        old["data.validation"] = old["data.validation"] or TENTH
    if new["device.kind"] == "auto":
        ignored += ("device.kind",)
    return {
        key: [old[key], value]
        for key, value in new.items()
        if old[key] != value and not key.startswith(ignored)
    }


def claim(
    place: RunLocation, resolved: Resolved, source: Source | Unopened, step: int
) -> tuple[Path, int]:
    """Make the directory, lock it, and write what a run that goes on after `step` begins with; for rank 0.

    Returns the directory and the descriptor of its lock, which the process holds until it closes it or ends.
    raises  ConfigError if the directory cannot be written, or if another run is going on in it
    """
    tiles = _text(resolved.config.device.tiles) if resolved.config.device.tiles else ""
    folder = place.folder
    try:
        folder = folder or _fresh()
        folder.mkdir(parents=True, exist_ok=True)
        with opened(folder) as run:
            lock = _lock(run)
            try:
                _begin(run, place, resolved, source, step, tiles)
            except BaseException:
                os.close(lock)
                raise
    except OSError as error:
        raise cannot_write(
            f"The run directory {folder or 'runs'}", error, "Choose another --out."
        ) from None
    return folder, lock


def _begin(
    run: Directory,
    place: RunLocation,
    resolved: Resolved,
    source: Source | Unopened,
    step: int,
    tiles: str,
) -> None:
    """Write what a run begins with, in a directory that nobody else writes to. tiles: the text of the table, if one was named"""
    config, folder = resolved.config, run.path
    with run.make(CHECKPOINTS) as checkpoints:
        sweep(checkpoints)
    if run.facts(CONFIG) and not place.has_run:
        raise ConfigError(f"Another run was made in {folder} meanwhile.", "Choose another --out.")
    if steps(folder / CHECKPOINTS)[-1:] != ([place.saved] if place.saved else []):
        raise ConfigError(f"Another run went on in {folder} meanwhile.", "Start this one again.")
    tables = _tables(resolved, source, folder)
    run.write_whole(
        CONFIG, f"{WHOLE.format(sum(map(len, tables.values())))}\n\n{tomli_w.dumps(tables)}"
    )
    if config.replication.tuning:
        run.write_whole(TUNING, tuning_text(resolved.tuning))
    if config.device.tiles:
        run.write_whole(TILES, tiles)
    if isinstance(source, TokenSource) and source.scan:
        run.write_whole(TOKENS, json.dumps(source.scan._asdict()) + "\n")
    run.remove_tree(TRACE)
    if config.run.trace:
        run.make(TRACE).close()
    if place.saved is None:
        run.write_whole(METRICS, "")
    else:
        cut_after(folder / METRICS, step)


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank's trace lies in a run directory."""
    return folder / TRACE / f"rank-{rank:05d}"


def noted_scan(folder: Path | None) -> Scan | None:
    """The scan that a run has noted in its directory; None if there is none, or none that can be read."""
    try:
        scan = Scan(**json.loads(contents(folder / TOKENS, inner=1))) if folder else None
        return scan if scan and type(scan.largest) is int and 0 <= scan.largest < 1 << 16 else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _fresh() -> Path:
    """runs/<date>-<n> with the first n that nobody has; made here, so that runs started together do not share it."""
    date = time.strftime("%Y-%m-%d")
    n = 1
    while True:
        try:
            (folder := RUNS / f"{date}-{n}").mkdir(parents=True)
            return folder
        except FileExistsError:
            n += 1


def _check_idle(folder: Path) -> None:
    """ConfigError if a run is going on in the folder, as far as its file system can tell."""
    with contextlib.suppress(OSError), opened(folder) as run, run.open(LOCK) as lock:
        _take(folder, lock.fileno())


def _take(folder: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"A run is going on in {folder} ({os.read(lock, 200).decode(errors='replace')}).",
            "Wait for it, stop it, or choose another --out.",
        ) from None


def _lock(run: Directory) -> int:
    """Take the lock; its file is cut off only once it is held."""
    lock = run.append(LOCK)
    try:
        _take(run.path, lock)
    except ConfigError:
        os.close(lock)
        raise
    except OSError as error:  # some file systems of clusters cannot lock
        print(
            f"warning: {run.path} cannot be locked ({error.strerror}): nothing keeps a second run out of it.",
            file=sys.stderr,
            flush=True,
        )
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _tables(resolved: Resolved, source: Source | Unopened, folder: Path) -> dict[str, Any]:
    """The configuration as tables, with what was left to be chosen filled in, valid from anywhere and after a move."""
    config = resolved.config
    tables = config.model_dump()
    tables["run"]["out"], tables["layout"]["dp"] = (
        ".",
        resolved.axes.dp,
    )  # this folder, in which the file lies
    tables["data"]["source"], tables["data"]["validation"] = (
        absolute(config.data.source),
        absolute(config.data.validation),
    )
    if config.data.source.startswith("tokens:"):
        tables["data"]["vocabulary"] = source.inputs
    tables["pipeline"]["schedule"] = _schedule(config.pipeline.schedule)
    if config.replication.tuning:
        tables["replication"]["tuning"] = TUNING
    if config.device.tiles:
        tables["device"]["tiles"] = TILES
    return parse(tables).model_dump()  # a path has become longer, and has to be UTF-8 still


def _schedule(name: str) -> str:
    """A schedule's name, or the path of its file from anywhere."""
    return name if name in NAMED else os.path.abspath(name)


def _text(tiles: str) -> str:
    """The table of tiles, whether or not this device reads it: the run may go on on another."""
    try:
        return contents(Path(tiles)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The table of tiles {tiles} cannot be read: {error}.",
            "mpitrain bench gemm --tune writes one.",
        ) from None
