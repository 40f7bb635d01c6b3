"""The run directory: `look` reads it before the model is built, `claim` writes it afterwards.

RUN/
    config.toml    the resolved configuration, with all keys
    metrics.jsonl  one JSON object per line
    checkpoints/   see checkpoint/saving.py
    tuning.json    the tuning of the cost model, if replication.tuning names one
    tiles.json     the tile sizes of GEMM kernels, if device.tiles names a file
    tokens.json    the result of the scan of a token file, if data.source is one
    scaling.json   means and deviations of arrays, if data.source has any
    tokenizer.json the tokenizer of conversations, or of the files of tokens that `data prepare` wrote
    init_from/     special tokens, generation and tokenizer in the folder of run.init_from
    lock           locked by rank 0 during the run
    tensorboard/   event files, with run.tensorboard
    trace/         the last actions of each rank, see trace/recorder.py
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from mpitrain.collectives.selection.algorithm import is_file, shown
from mpitrain.collectives.selection.tuning import tuning_text
from mpitrain.config import CONFIG, PATHS, Config, Data, check_text, keys, read_toml
from mpitrain.config.plugins import MARK, check_named, digests, entries, imported, load
from mpitrain.data import (
    TENTH,
    Scan,
    Source,
    Unopened,
    absolute,
    as_it_is,
    source_kind,
    tokenizer_of,
    writes_text,
)
from mpitrain.data.templates import day_of, without_day
from mpitrain.data.tokenizer import BYTES_FILE, TOKENIZER
from mpitrain.errors import CheckpointError, ConfigError, DataError, say
from mpitrain.files import (
    FOUND_WRONG,
    appending,
    cannot_write,
    contents,
    own_folder,
    reading,
    remedy,
    remove,
    text_of,
    whole,
    write_whole,
)
from mpitrain.formats.companions import INIT_FROM, OF_MODEL, of_folder
from mpitrain.formats.writing import is_of_bytes
from mpitrain.optim import without_unread
from mpitrain.pipeline.schedules import NAMED
from mpitrain.run.checkpoint.manifest import (
    CHECKPOINTS,
    LOCK,
    Manifest,
    newest,
    read_chosen,
    read_manifest,
    step_of,
    steps,
    sweep,
    verify,
)
from mpitrain.run.choices import ALGORITHMS, without_plugins
from mpitrain.run.job import Job, with_hyper_parameters
from mpitrain.run.metrics import METRICS, check_kept, cut_after, is_number, read_metrics
from mpitrain.strict_json import parsed
from mpitrain.trace.timeline import TRACE

TUNING, TILES, TOKENS = "tuning.json", "tiles.json", "tokens.json"
SCALING = "scaling.json"

RUNS = Path("runs")
"""The parent of run directories if run.out is empty."""
WHOLE = "# All {} keys of a run of mpitrain."
"""The first line of config.toml in a run directory."""
OF_DATA = ("data.vocabulary", "data.classes", "data.labels")
"""Keys that are taken from the data where they are not set."""
FIXED = (
    "model.",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "optimizer.name",
    "optimizer.groups",
    *OF_DATA,
)
"""The keys that must not change when a run resumes: other values mean another model."""
OF_MEANING = (TOKENIZER, SCALING)
"""The files of a run directory that say what the numbers in its parameters stand for."""


def look(config: Config, resume: str, ranks: int) -> dict[str, Any]:
    """Find the run directory that the configuration names; return what it tells, as `agree_on` takes it.

    Only rank 0 calls this.
    resume  "no" refuses a directory with a run, "yes" one without a checkpoint; "auto" accepts both
    ranks   number of ranks, for the advice in errors
    """
    if not config.run.out:
        if resume != "no":
            raise ConfigError("--resume needs the directory of the run.", _how_to_resume(ranks))
        return {}
    folder = Path(config.run.out)
    saved = steps(folder / CHECKPOINTS)
    has_run = bool(saved) or is_run(folder)
    if resume == "no" and has_run:
        check_idle(folder)
        way_on = (
            "--resume to go on with it"
            if saved
            else "--resume=auto to start it again, for it has no checkpoint"
        )
        raise ConfigError(
            f"{folder} already holds a run.",
            f'Add {way_on}, or choose another --out. In Python: resume="auto", or another run.out.',
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
        return {"folder": str(folder), "has_run": has_run}
    then = configuration(folder)
    newest_saved, manifest = read_chosen(lambda: newest(folder / CHECKPOINTS))
    check_meaning(then.flat(), newest_saved, manifest)
    check_kept(folder / METRICS, manifest.metrics, manifest.done.step)
    check_named(then.run.plugins, digests(config.run.plugins), folder)
    changed = _changes(then, with_hyper_parameters(config))
    if fixed := [
        f"{key} {then!r} -> {now!r}"
        for key, (then, now) in changed.items()
        if key.startswith(FIXED)
    ]:
        raise ConfigError(
            f"{folder} was trained with another model: {', '.join(fixed)}.",
            "Resume with the configuration of the run, or start another one with its own --out.",
        )
    if config.run.epochs and "data.packing" in changed:
        was, now = changed["data.packing"]
        raise ConfigError(
            f"run.epochs counts rows of one kind, but data.packing was {was} in {folder} and is {now}.",
            "Leave data.packing as it was, or set run.steps (--steps) in place of run.epochs.",
        )
    is_same = "data.source" not in changed and not config.data.validation
    named = {key: getattr(then.data, key) for key in ("classes", "labels")}
    if is_same:
        named["validation"] = held_out_as_before(then.data, ())["validation"]
    return {
        "folder": str(folder),
        "has_run": has_run,
        "saved": str(newest_saved),
        "progress": manifest.done[:2],
        "changed": changed,
        "largest": noted_largest(folder, config.data.source, config.data.dtype),
        "scaling": noted_scaling(folder),
        "passes": then.device.passes,
        "named": named,
        "day": day_of(then.data.template),
    }


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run; ConfigError if that cannot be seen."""
    try:
        return CONFIG in os.listdir(folder)
    except OSError as error:
        if error.errno in (*FOUND_WRONG, errno.ENAMETOOLONG):
            return False
        law = f"The run directory {folder} cannot be read: {error.strerror}."
        raise ConfigError(law, remedy(error, "")) from None


def _how_to_resume(ranks: int) -> str:
    try:
        saved = [
            (checkpoints[-1].stat().st_mtime, folder)
            for folder in RUNS.iterdir()
            if (checkpoints := steps(folder / CHECKPOINTS))
        ]
    except OSError:  # There are no runs, or one has just been removed.
        saved = []
    if not saved:
        return f"Add --out DIR; no run under {RUNS} has a checkpoint."
    start = f"mpitrain launch -n {ranks} -- train" if ranks > 1 else "mpitrain train"
    return f"To go on with the newest run under {RUNS}, type: {start} --resume --out {shlex.quote(str(max(saved)[1]))}"


def configuration(folder: Path) -> Config:
    """Return the configuration that a run was last trained with.

    A file of an earlier version may lack newer keys, whose defaults keep the earlier behaviour: the
    first line of the file has the number of its keys. Any other file that lacks a key is refused.
    """
    tables = read_toml(folder / CONFIG)
    if isinstance(tables.get("run"), dict) and "out" in tables["run"]:
        # The folder may have a new name that is not valid in a configuration.
        tables["run"]["out"] = "."
    check_named(entries(tables), imported(), folder)
    then = without_plugins(tables, folder / CONFIG)
    then = then.model_copy(update={"optimizer": without_unread(then.optimizer)})
    missing = [
        key.name
        for key in keys()
        if key.name.split(".")[1] not in tables.get(key.name.split(".")[0], {})
    ]
    header = re.match(WHOLE.format("([0-9]{1,6})"), text_of(folder / CONFIG).decode())
    if missing and not (header and int(header[1]) == sum(map(len, tables.values()))):
        named = ", ".join(missing[:8]) + (
            f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        )
        raise ConfigError(
            f"{folder / CONFIG} is not the whole configuration of its run: it lacks {named}.",
            "Write into it what the run was trained with, or start another run with its own --out.",
        )
    return then


def check_algorithms_named(then: Config, settings: Sequence[str], folder: Path) -> None:
    """Raise ConfigError unless the settings name the files of all-reduces that a run used.

    The name in a run directory is not enough to run code: its author may be another person.
    """
    named = {setting.partition("=")[0].strip() for setting in settings}
    for key in ALGORITHMS:
        if is_file(value := then.flat()[key]) and key not in named:
            raise ConfigError(
                f"The run in {folder} was trained with the algorithm {value}, but none was named now.",
                "Read the file, then name it: --set "
                + shlex.quote(f"{key}={value.partition(MARK)[0]}"),
            )


def held_out_as_before(then: Data, settings: Sequence[str]) -> dict[str, Any]:
    """Return the table `data` of an earlier run, to open it again with the same held-out tokens.

    If the settings name another data.source, the default of data.validation applies to that.
    A run of a version without data.validation held out the last tenth.
    """
    names = [setting.partition("=")[0].strip() for setting in settings]
    data = then.model_dump()
    if "data.source" in names:
        return {**data, "validation": ""}
    return (
        {**data, "validation": TENTH}
        if source_kind(then.source).is_token_file and not then.validation
        else data
    )


def _changes(then: Config, now: Config) -> dict[str, list[Any]]:
    old, new = then.flat(), now.flat()
    # These keys are resolved anew at every start.
    # `_note_tokenizer` refuses another tokenizer.
    ignored: tuple[str, ...] = (
        "run.out",
        "run.watchers",
        "run.inject",
        "layout.",
        "replication.tuning",
        "device.tiles",
    )
    ignored += ("data.tokenizer", *(["run.steps"] if new["run.epochs"] else []))
    ignored += tuple(
        key
        for key in (*OF_DATA, "data.validation", "data.template", "batch.micro_batches")
        if not new[key]
    )
    for values in (old, new):  # A resumed run keeps its day.
        values["data.template"] = without_day(values["data.template"])
    for key in ("data.source", "data.validation"):
        new[key] = absolute(new[key])  # The run directory has absolute paths.
        old[key] = absolute(
            old[key]
        )  # That of an earlier version has folders with brackets as they are.
    for key in ("run.init_from", "lora.init_from"):
        new[key] = _absolute_path(new[key])
    new["data.mixture"] = _absolute(new["data.mixture"])
    new["pipeline.schedule"] = _schedule(new["pipeline.schedule"])
    if "loss" not in now.model.model_fields_set:
        new["model.loss"] = old["model.loss"]  # The data choose it, as they did.
    for values in (old, new):  # The files may have moved.
        values["run.plugins"] = digests(values["run.plugins"])
        for key in ALGORITHMS:
            if is_file(values[key]):
                values[key] = shown(values[key]) + MARK + digests([values[key]])[0]
    if source_kind(old["data.source"]).is_token_file:
        old["data.validation"] = old["data.validation"] or TENTH
    ignored += tuple(key for key in ("device.kind", "device.passes") if new[key] == "auto")
    return {
        key: [old[key], value]
        for key, value in new.items()
        if old[key] != value and not key.startswith(ignored)
    }


def claim(
    agreed: Job,
    resolved: Job,
    source: Source | Unopened,
    step: int,
    alive: Callable[[], None] = lambda: None,
) -> tuple[Path, dict[str, Any], int]:
    """Make and lock the run directory, and write its first files; only rank 0 calls this.

    agreed    the job as `agree_on` returned it
    step      number of steps before this start, -1 if the run begins anew; metrics of later steps are removed
    alive     called after each file
    returns   the directory, the `meaning` of its parameters, and the descriptor of its lock, which
              the caller must close
    """
    tiles = _text(resolved.config.device.tiles) if resolved.config.device.tiles else ""
    folder = Path(agreed.folder) if agreed.folder else None
    try:
        folder = folder or _fresh()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            meant = _begin(folder, agreed, resolved, source, step, tiles, alive)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise cannot_write(
            f"The run directory {folder or 'runs'}", error, "Choose another --out."
        ) from None
    return folder, meant, lock


def _begin(
    folder: Path,
    agreed: Job,
    resolved: Job,
    source: Source | Unopened,
    step: int,
    tiles: str,
    alive: Callable[[], None],
) -> dict[str, Any]:
    config = resolved.config
    sweep(own_folder(folder / CHECKPOINTS), alive)
    if os.path.lexists(folder / CONFIG) and not agreed.has_run:
        raise ConfigError(f"Another run was made in {folder} meanwhile.", "Choose another --out.")
    if steps(folder / CHECKPOINTS)[-1:] != ([Path(agreed.saved)] if agreed.saved else []):
        raise ConfigError(f"Another run went on in {folder} meanwhile.", "Start this one again.")
    tables = _tables(resolved, source, folder)
    write_whole(
        folder / CONFIG,
        f"{WHOLE.format(sum(map(len, tables.values())))}\n\n{tomli_w.dumps(tables)}",
    )
    alive()
    if config.replication.tuning:
        write_whole(folder / TUNING, tuning_text(resolved.tuning))
        alive()
    if config.device.tiles:
        write_whole(folder / TILES, tiles)
        alive()
    if scan := getattr(source, "scan", None):
        write_whole(folder / TOKENS, json.dumps(scan._asdict()) + "\n")
        alive()
    if scaling := getattr(source, "scaling", None):
        write_whole(folder / SCALING, scaling.model_dump_json() + "\n")
        alive()
    _note_tokenizer(folder, config, bool(agreed.saved))
    alive()
    remove(folder.resolve() / TRACE)  # The user may name the run directory itself by a link.
    if config.run.trace:
        (folder / TRACE).mkdir()
    cut_after(folder / METRICS, step)
    values = {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }
    if source.form in ("tokens", "texts"):
        values["data.vocabulary"] = source.inputs
    return meaning(values, folder)


def meaning(values: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return what the parameters of a run mean: {key: value} of FIXED, {file: SHA-256} of OF_MEANING.

    values  {section.key: value} of its configuration
    """
    fixed = {key: value for key, value in values.items() if key.startswith(FIXED)}
    texts = {name: text_in(run, name) for name in OF_MEANING}
    return fixed | {
        name: hashlib.sha256(text).hexdigest() for name, text in texts.items() if text is not None
    }


def check_meaning(values: Mapping[str, Any], saved: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if the parameters of a checkpoint have another meaning in its run directory.

    A key of OF_DATA that is not set has none.

    values  {section.key: value} of config.toml there
    """
    run = saved.parent.parent
    then, now = manifest.meaning, meaning(values, run)
    for name in OF_MEANING:
        if name in then and then[name] != now.get(name):
            fault = "has another content now" if name in now else "is missing"
            raise CheckpointError(
                f"{saved} belongs to {run / name}, which {fault}.",
                "Copy it there again, as it was in this run.",
            )
    differing = {
        key: (then[key], now[key])
        for key in sorted(then.keys() & now.keys())
        if then[key] != now[key] and not (key in OF_DATA and not (then[key] and now[key]))
    }
    if differing:
        listed = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in differing.items())
        lines = ", ".join(f"{key} = {json.dumps(old)}" for key, (old, _) in differing.items())
        raise CheckpointError(
            f"{saved} was trained with another model than {run / CONFIG} says: {listed}.",
            f"Write there what it was trained with: {lines}.",
        )


def _note_tokenizer(folder: Path, config: Config, has_begun: bool) -> None:
    """Copy the tokenizer of the data, unless its tokens are bytes.

    If the data have none, a new run takes the tokenizer in the folder of run.init_from.
    """
    data = config.data
    names = [*data.mixture] or [data.source]
    is_bytes = writes_text(data.source, data.mixture, data.tokenizer)
    tokenizer = BYTES_FILE if is_bytes else tokenizer_of(names, data.tokenizer)
    if not has_begun:
        remove(folder.resolve() / INIT_FROM)
        if config.run.init_from:
            tokenizer = _note_companions(folder, Path(config.run.init_from), tokenizer, names)
    if not tokenizer or is_bytes:
        return
    if os.path.lexists(folder / TOKENIZER) and contents(folder / TOKENIZER) != tokenizer:
        raise ConfigError(
            f"{folder} has another {TOKENIZER} than {', '.join(names)}.",
            "Use data of the same tokenizer, or another --out.",
        )
    with whole(folder / TOKENIZER) as file:
        file.write(tokenizer)


def _note_companions(
    run: Path, folder: Path, tokenizer: bytes | None, names: Sequence[str]
) -> bytes | None:
    """Copy the companions of the model of run.init_from, if its tokens are those of the data.

    tokenizer  of the data
    returns    the tokenizer of the run
    """
    of_model, files = text_in(folder, TOKENIZER), of_folder(folder)
    is_same = tokenizer == of_model or (tokenizer == BYTES_FILE and is_of_bytes(of_model or b""))
    if tokenizer and of_model and not is_same:
        say(f"note: {', '.join(names)} and {folder} have different tokenizers.")
        return tokenizer
    if tokenizer and not of_model and TOKENIZER not in files:
        files = {name: content for name, content in files.items() if name in OF_MODEL}
    if files:
        for name, content in files.items():
            copy = run / INIT_FROM / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with whole(copy) as file:
                file.write(content)
    return tokenizer or of_model


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    records = read_metrics(folder / METRICS)
    if not records and not os.path.lexists(folder / METRICS):
        raise ConfigError(
            f"There is no run in {folder}: it has no {METRICS}.", "Name directories of runs."
        )
    return records


def checkpoint_of(run: Path, best: bool) -> Path:
    """Return the newest checkpoint of a run, or the one with the best validation loss.

    raises  CheckpointError if there is none
    """
    if not best:
        return newest(run / CHECKPOINTS)
    saved = {step_of(path.name): path for path in steps(run / CHECKPOINTS)}
    losses = _losses(metrics_of(run), saved)
    if not losses:
        raise CheckpointError(
            f"--best needs a checkpoint with a validation loss, but {run} has none.",
            "Leave it out, or train with --set checkpoint.best=true.",
        )
    return saved[_best(losses)]


def _losses(records: Sequence[Mapping[str, Any]], saved: Container[Any]) -> dict[int, float]:
    """Return the validation losses of the saved steps."""
    return {
        record["step"]: record["val_loss"]
        for record in records
        if record.get("step") in saved and is_number(record.get("val_loss"))
    }


def _best(losses: Mapping[int, float]) -> int:
    return min(losses, key=lambda step: (losses[step], step))


class ListedCheckpoint(NamedTuple):
    """A checkpoint of a run; a number that is not known is NaN.

    seconds   that its save took
    note      whether it is the best or the newest, and what a verification found
    problem   the reason why it cannot be read; empty: there is none
    """

    step: int
    nbytes: float
    seconds: float
    val_loss: float
    note: str
    problem: str


def checkpoints_of(run: Path, does_verify: bool) -> list[ListedCheckpoint]:
    """Return the checkpoints of a run, oldest first; with `does_verify` read all their blocks.

    An active run may remove one meanwhile; then its successors are listed.

    raises  ConfigError if this is no run
    """
    metrics_of(run)
    seen: dict[Path, tuple[float, str, str]] = {}
    while fresh := [path for path in steps(run / CHECKPOINTS) if path not in seen]:
        seen |= {path: _examined(path, does_verify) for path in fresh}
        here = steps(run / CHECKPOINTS)
        gone = [path for path, (*_, problem) in seen.items() if problem and path not in here]
        for path in gone:
            del seen[path]
        if not gone:
            break
    records = metrics_of(run)
    paths = {step_of(path.name): path for path in seen}
    took = {one.get("step"): one["checkpoint_s"] for one in records if "checkpoint_s" in one}
    losses = _losses(records, paths)
    rows = []
    for step, path in sorted(paths.items()):
        nbytes, result, problem = seen[path]
        places = {"best": losses and step == _best(losses), "newest": step == max(paths)}
        notes = [name for name, is_here in places.items() if is_here] + [result] * bool(result)
        seconds = took.get(step)
        rows.append(
            ListedCheckpoint(
                step,
                nbytes,
                seconds if is_number(seconds) and seconds else math.nan,
                losses.get(step, math.nan),
                ", ".join(notes),
                problem,
            )
        )
    return rows


def _examined(path: Path, does_verify: bool) -> tuple[float, str, str]:
    """Return the bytes of a checkpoint, a note, and the reason why it cannot be read, or ""."""
    nbytes = math.nan
    try:
        manifest = read_manifest(path)
        nbytes = sum(file.nbytes for file in manifest.files.values())
        if does_verify:
            verify(path, manifest, 0, 1)
        return nbytes, "verified" * does_verify, ""
    except CheckpointError as error:
        cause = error.__context__
        is_unknown = isinstance(cause, OSError) and cause.errno not in FOUND_WRONG
        return nbytes, "not readable" if is_unknown else "damaged", error.law


def text_in(folder: Path, name: str) -> bytes | None:
    try:
        return text_of(folder / name)
    except FileNotFoundError:
        return None


def noted_largest(folder: Path, source: str, dtype: str) -> int | None:
    """Return the largest token of a token file that a run directory has noted; None if there is
    no valid note, or if the file has changed since.
    """
    try:
        scan = Scan(**json.loads(contents(folder / TOKENS)))
        is_valid = type(scan.largest) is int and 0 <= scan.largest < 1 << 32
        is_known = is_valid and scan == as_it_is(source, dtype)._replace(largest=scan.largest)
        return scan.largest if is_known else None
    except (OSError, ValueError, TypeError, RecursionError, DataError):
        return None


def noted_scaling(folder: Path) -> Any:
    """Return the content of scaling.json of a run directory, which its source checks; None if there is none."""
    try:
        return parsed(contents(folder / SCALING))
    except FileNotFoundError:
        return None
    except OSError as error:
        law = f"{folder / SCALING} cannot be read: {error.strerror or error}."
        raise CheckpointError(law, remedy(error, "Copy it again.")) from None
    except ValueError as error:
        law = f"{folder / SCALING} is damaged: {error}."
        raise CheckpointError(law, "Copy it again.") from None


def _fresh() -> Path:
    """Make runs/<date>-<n> with the first free n, at once: other runs may start now."""
    date = time.strftime("%Y-%m-%d")
    n = 1
    while True:
        try:
            (folder := RUNS / f"{date}-{n}").mkdir(parents=True)
            return folder
        except FileExistsError:
            n += 1


def check_idle(folder: Path) -> None:
    with contextlib.suppress(OSError), reading(folder / LOCK) as lock:
        _take(folder, lock.fileno())


def _take(folder: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"A run is going on in {folder} ({os.read(lock, 200).decode(errors='replace')}).",
            "Wait for it, stop it, or choose another --out.",
        ) from None


def _lock(folder: Path) -> int:
    """Lock a run directory, and write this process into the lock file; return its descriptor."""
    lock = appending(folder / LOCK)
    try:
        _take(folder, lock)
    except ConfigError:
        os.close(lock)
        raise
    except OSError as error:  # Some file systems of clusters have no locks.
        say(
            f"warning: {folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it."
        )
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock


def _tables(resolved: Job, source: Source | Unopened, folder: Path) -> dict[str, Any]:
    """Return the resolved configuration for config.toml; a moved run directory stays valid."""
    config = resolved.config
    tables = config.model_dump()
    # The file is in the run directory, so run.out is the file's own folder.
    tables["run"]["out"], tables["layout"]["dp"] = ".", resolved.axes.dp
    tables["run"]["plugins"] = [*map(os.path.abspath, config.run.plugins)]
    tables["run"]["init_from"] = _absolute_path(config.run.init_from)
    tables["lora"]["init_from"] = _absolute_path(config.lora.init_from)
    tables["data"]["source"], tables["data"]["validation"] = (
        absolute(config.data.source),
        absolute(config.data.validation),
    )
    tables["data"]["mixture"] = _absolute(config.data.mixture)
    if source.form == "texts":
        tables["data"]["classes"] = source.classes
        tables["data"]["labels"] = [*getattr(source, "labels", config.data.labels)]
    if source.form in ("tokens", "texts") and not (
        source_kind(config.data.source).is_text and not config.data.tokenizer
    ):
        tables["data"]["vocabulary"] = source.inputs
    if config.data.tokenizer:
        tables["data"]["tokenizer"] = TOKENIZER
    tables["pipeline"]["schedule"] = _schedule(config.pipeline.schedule)
    if config.replication.tuning:
        tables["replication"]["tuning"] = TUNING
    if config.device.tiles:
        tables["device"]["tiles"] = TILES
    for section, key in PATHS:  # An absolute path may have parts that are not UTF-8.
        check_text(f"{section}.{key}", "".join(tables[section][key]))
    return dict(load(tables))


def _absolute(mixture: Mapping[str, float]) -> dict[str, float]:
    return {absolute(name): weight for name, weight in mixture.items()}


def _absolute_path(path: str) -> str:
    return os.path.abspath(path) if path else ""


def _schedule(name: str) -> str:
    return name if name in NAMED else os.path.abspath(name)


def _text(tiles: str) -> str:
    """Return the tile sizes as text; the run directory keeps them for a resume on another device."""
    try:
        return text_of(Path(tiles)).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The table of tiles {tiles} cannot be read: {getattr(error, 'strerror', error)}.",
            "mpitrain bench gemm --tune writes one.",
        ) from None
