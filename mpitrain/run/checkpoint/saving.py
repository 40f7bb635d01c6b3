"""Saving of sharded checkpoints, as torch.distributed.checkpoint does; loading.py reads them in any layout.

    checkpoints/step-00000400/
        model-00001-of-00003.safetensors  whole parameter tensors under their full names
        model.safetensors.index.json      the usual index of several files; any tool can read it
        state-00000.safetensors           regions of optimizer state and residuals, by rank 0
        manifest.json                     the list of these regions, the SHA-256 of each block of
                                          each file, and the progress of the run

All ranks write in parallel. One rank writes each replicated element, and no rank needs memory for
the whole model. A checkpoint is written to a temporary directory, and then renamed.

    between two steps
      all ranks  gather the descriptions of their state        regions.described
      all ranks  assign each element to a writer               shared_out
      all ranks  send parameters to the writers                join
      all ranks  give elements to their files, or copy them    _fill
    then, or by a thread, without messages
      all ranks  complete the files, and list their digests    Save.write
      rank 0     collects the lists, writes index and
                 manifest, renames                             Save.publish
"""

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import MpitrainError, TrainingError, say
from mpitrain.files import contents, mend, write_whole
from mpitrain.formats.safetensors_files import (
    BLOCK,
    INDEX,
    MOVED,
    Writing,
    WritingTensors,
    WrittenFile,
)
from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Common, Piece, Runs, common, cut, one_run, without
from mpitrain.run.checkpoint.manifest import (
    FORMAT,
    File,
    Manifest,
    Stored,
    abandon,
    prepare,
    put_in_place,
    write_manifest,
)
from mpitrain.run.checkpoint.regions import PARAMETERS, HeldRegion, described, holdings, runs
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.base import Transport

PIECE = "a piece of the checkpoint"
"""The name of each write in the trace."""
LIST = "written-{:05d}.json"
"""The name of the list of a rank's files and stored regions, until the checkpoint is published."""
LONGEST = 0.2
"""Seconds between two looks whether the thread of a save has got further."""
LOOK = 0.05
"""Seconds between two looks of rank 0 for the list of another rank."""
COURTESY = 10
"""The niceness of a thread that saves: the step needs the processors first."""


Holders = list[tuple[int, HeldRegion]]
"""(rank, its region of one tensor), ascending by rank."""


class Joined(NamedTuple):
    """A whole parameter tensor, and the rank that gathers and writes it.

    writer   the rank; -1 before it is assigned
    holders  the regions of all ranks, from which the tensor is joined
    """

    writer: int
    dtype: np.dtype
    shape: tuple[int, ...]
    holders: Holders

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Shares(NamedTuple):
    """The assignment of all elements to writers; the same on all ranks.

    tensors  whole parameter tensors by full name, with their writers
    pieces   for each rank, the regions of its own state that it writes
    nbytes   that each rank writes
    """

    tensors: dict[str, Joined]
    pieces: list[list[HeldRegion]]
    nbytes: list[int]


class Contribution(NamedTuple):
    """The elements of a tensor that one rank contributes.

    number  index of the `StateBuffer` on that rank
    runs    the elements, and their offsets in its array
    """

    rank: int
    number: int
    runs: Runs


class HostRoom(NamedTuple):
    """The memory that a rank finds on its host for copies of a checkpoint.

    free   bytes that are free now
    limit  bytes of memory.limit_gb on the host; 0: there is no limit, or it is one of GPUs
    held   bytes that this rank counts against the limit
    """

    free: int
    limit: int
    held: int


class Short(NamedTuple):
    """A host without memory for the copies of a checkpoint: its name and ranks, and bytes."""

    host: str
    ranks: int
    needed: int
    room: int


def share_out(
    kept: Sequence[StateBuffer], storage: Storage, transport: Transport, room: HostRoom | None
) -> tuple[Shares, Short | None]:
    """Assign all elements to writers; return also the first host without room for copies; collective.

    room  None: no rank makes copies
    """
    everyone = transport.gather_text([described(storage, kept), room])
    shares = shared_out([holdings(listed) for listed, _ in everyone])
    for host in dict.fromkeys(transport.hosts) if room else ():
        here = [rank for rank, other in enumerate(transport.hosts) if other == host]
        rooms = [HostRoom(*everyone[rank][1]) for rank in here]
        left = min(other.free for other in rooms)
        if limit := rooms[0].limit:
            left = min(left, limit - sum(other.held for other in rooms))
        if (needed := sum(shares.nbytes[rank] for rank in here)) > left:
            return shares, Short(host, len(here), needed, left)
    return shares, None


class Copies:
    """The tensors of a new file, copied to memory: `close` writes the file, in any thread."""

    def __init__(self, *arguments: Any):
        """arguments: of the `WritingTensors` that this object stands for."""
        self._arguments, self._parts = arguments, deque[np.ndarray]()

    def write(self, data: np.ndarray) -> None:
        """Append the elements of an array, which is copied unless it owns its memory."""
        self._parts.append(data if data.base is None else data.copy())

    @property
    def left(self) -> int:
        """The number of pieces that are not written yet."""
        return len(self._parts)

    def close(self) -> WrittenFile:
        file = WritingTensors(*self._arguments)
        while self._parts:
            file.write(self._parts.popleft())
        return file.close()


class Save:
    """A checkpoint that is on its way: its elements are in files or copies, and the state may change.

    Without `start`, `wait` does the rest. The thread of `start` makes no MPI call. After each block that is
    filled, and each file that is synced or removed, the watchdog hears that the save moves.

    path       of the published checkpoint
    nbytes     of the model and state files of all ranks; on rank 0, after publication
    is_copied  whether the elements are in copies
    paused_s   seconds in which the state had to stay as it was
    seconds    from the beginning to the publication
    """

    def __init__(
        self,
        folder: Path,
        transport: Transport,
        manifest: Manifest,
        keep: int,
        keeps: Callable[[int], bool],
        alive: Callable[[], None],
    ):
        """Take a manifest without files, and the other arguments of `begin`."""
        step = manifest.done.step
        self.path, self.step, self.nbytes, self.is_copied = (
            folder / f"step-{step:08d}",
            step,
            0,
            False,
        )
        self._unfinished = folder / f".step-{step:08d}.partial"
        self._transport, self._manifest = transport, manifest
        self._keep, self._keeps, self._alive = keep, keeps, alive
        # Pieces of work that are done, and the thread that may record them.
        self._moves, self._recording = 0, threading.get_ident()
        self._files: dict[str, Writing | Copies] = {}
        self._stored: list[Stored] = []
        self._thread: threading.Thread | None = None
        self._written, self._published = Future[None](), Future[None]()
        self._began, self.paused_s, self.seconds = time.perf_counter(), 0.0, 0.0
        self._given_up = threading.Event()
        self._reach: Callable[[str, int], None] = lambda point, step: None

    @property
    def is_published(self) -> bool:
        """Whether this rank has done its part; on rank 0, whether the checkpoint is published."""
        return self._published.done() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return any(
            part.done() and part.exception() is not None
            for part in (self._written, self._published)
        )

    def attempt(self, part: Callable[[], Any]) -> Any:
        """Call `part` on every rank; an OSError on any is a TrainingError on all; collective."""
        return on_all_ranks(self._transport, partial(self._in_words, part))

    def _in_words(self, part: Callable[[], Any]) -> Any:
        try:
            return part()
        except OSError as error:
            raise TrainingError(
                f"The checkpoint of step {self.step} cannot be written to {self.path.parent}: "
                f"{error.strerror or error}.",
                f"{mend(error)}, then go on with --resume; the checkpoints before it are still good.",
            ) from None

    def fill(
        self,
        shares: Shares,
        kept: Sequence[StateBuffer],
        backend: Backend,
        new_file: Callable[..., Writing | Copies],
    ) -> None:
        """Make the temporary directory, and give this rank's files their elements; collective."""
        self.is_copied, self._shares = new_file is Copies, shares
        moved = self._moved
        self.attempt(lambda: self._transport.rank == 0 and prepare(self._unfinished, moved))
        self._files, self._stored = _fill(
            self._unfinished,
            shares,
            kept,
            self._transport,
            backend,
            self._manifest,
            new_file,
            moved,
        )
        self.paused_s = time.perf_counter() - self._began

    def start(self, reach: Callable[[str, int], None]) -> None:
        """Complete and publish the checkpoint in a thread; without one, before this returns.

        reach  as `Run.reach`
        """

        def work() -> None:
            _do(self._write, self._written)
            if not self.has_failed:
                _do(self._publish, self._published)

        def work_in_thread() -> None:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COURTESY)
            work()

        self._reach = reach
        thread = threading.Thread(target=work_in_thread, name="checkpoint", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            rank = self._transport.rank
            say(
                f"warning: rank {rank} saves step {self.step} while training waits: {error} (see ulimit -u)."
            )
            work()

    def wait(self) -> None:
        """Return when the checkpoint is published; collective.

        raises  TrainingError on every rank if any of them could not write; older checkpoints stay
                valid
        """
        began = time.perf_counter()
        try:
            self.attempt(lambda: self._result(self._write, self._written))
            self.attempt(lambda: self._result(self._publish, self._published))
        except MpitrainError:
            # All ranks raise it together, so no rank still writes.
            self.give_up()
            if self._transport.rank == 0:
                abandon(self._unfinished)
            raise
        self.paused_s += time.perf_counter() - began

    def give_up(self) -> None:
        """Return when the thread has ended, which no longer waits for the lists of other ranks."""
        self._given_up.set()
        if self._thread:
            self._thread.join()

    def _result(self, part: Callable[[], None], done: Future[None]) -> None:
        if not self._thread and not done.done():
            _do(part, done)
        before = None
        while not wait([done], timeout=LONGEST).done:
            if (now := self.progress()) != before:
                self._say_alive()
            before = now
        done.result()

    def progress(self) -> tuple[int, int]:
        """Return two numbers that change with each piece of work: what is done, and what is not written."""
        copies = [file for file in self._files.values() if isinstance(file, Copies)]
        return self._moves, sum(copy.left for copy in copies)

    def _moved(self) -> None:
        """Note that a piece of work is done, in the thread of the run or in that of `start`."""
        self._moves += 1
        if threading.get_ident() == self._recording:
            self._say_alive()

    def _say_alive(self) -> None:
        """Let the watchdog of this rank, and those that read its trace, see that the save moves."""
        with self._transport.recorder.working(PIECE):
            self._alive()

    def _write(self) -> None:
        """Complete this rank's files, and leave the list of them in the temporary directory."""
        self._reach("thread", self.step)
        rank = self._transport.rank
        files = {}
        for name, file in self._files.items():
            files[name] = File(rank, *file.close())
            self._moved()
        text = json.dumps([files, self._stored])
        write_whole(self._unfinished / LIST.format(rank), text)
        self._moved()

    def _publish(self) -> None:
        """Publish the checkpoint once all ranks have left their lists; on rank 0."""
        written: dict[str, File] = {}
        stored: list[Any] = []
        if self._transport.rank == 0:
            for rank in range(self._transport.size):
                path = self._unfinished / LIST.format(rank)
                while not path.exists():
                    if self._given_up.wait(LOOK):
                        return
                files, regions = json.loads(contents(path))
                written |= {name: File(*facts) for name, facts in files.items()}
                stored += regions
                path.unlink()
            self._reach("publish", self.step)
            manifest = self._manifest._replace(files=written, stored=stored)
            keep = self._keep, self._keeps
            _finish(self._unfinished, self.path, self._shares, manifest, *keep, self._moved)
        self.nbytes = sum(file.nbytes for file in written.values())
        self.seconds = time.perf_counter() - self._began


def _do(part: Callable[[], None], done: Future[None]) -> None:
    try:
        part()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def begin(
    folder: Path,
    kept: Sequence[StateBuffer],
    storage: Storage,
    transport: Transport,
    backend: Backend,
    manifest: Manifest,
    keep: int,
    keeps: Callable[[int], bool] = lambda step: False,
    room: HostRoom | None = None,
    least: int = 0,
    alive: Callable[[], None] = lambda: None,
) -> Save:
    """Begin a checkpoint under `folder`; its publication removes older ones; collective.

    kept      the state of this rank; buffers named "parameters" are written as whole tensors
    manifest  without files. `load` restores "own" and "mean" state exactly, and "bound" state at
              all, only in its layout
    keep      number of newest checkpoints to keep
    keeps     (step) -> whether to keep an older checkpoint, too; called in the thread of `start`
    room      the elements are copied if all ranks have room for that; None: they are not
    least     nor are they if no rank writes at least so many bytes
    alive     called in this thread after each piece of work
    raises    TrainingError on every rank if any of them cannot write
    """
    save = Save(folder, transport, manifest, keep, keeps, alive)
    shares, short = share_out(kept, storage, transport, room)
    does_copy = room and not short and max(shares.nbytes) >= least
    save.fill(shares, kept, backend, Copies if does_copy else WritingTensors)
    return save


def _fill(
    folder: Path,
    shares: Shares,
    kept: Sequence[StateBuffer],
    transport: Transport,
    backend: Backend,
    manifest: Manifest,
    new_file: Callable[..., Writing | Copies],
    moved: Callable[[], None],
) -> tuple[dict[str, Writing | Copies], list[Stored]]:
    """Give elements to this rank's files, which stay open, and to other writers; collective."""
    rank = transport.rank
    metadata = {
        "format": FORMAT,
        **{name: str(value) for name, value in manifest.done._asdict().items()},
        "rank": str(rank),
        "ranks": str(transport.size),
    }
    files: dict[str, Writing | Copies] = {}
    model = None
    names = _model_files(shares)
    if rank in names:
        tensors = {
            name: (joined.dtype, joined.shape)
            for name, joined in shares.tensors.items()
            if joined.writer == rank
        }
        model = files[names[rank]] = new_file(folder / names[rank], tensors, metadata)
    join(shares, kept, model, transport, backend, moved)
    regions = {_key(held): held for held in shares.pieces[rank]}
    name = f"state-{rank:05d}.safetensors"
    if regions:
        arrays = {key: (region.dtype, (region.part.length,)) for key, region in regions.items()}
        files[name] = new_file(folder / name, arrays, metadata)
    for region in regions.values():
        count = MOVED // region.dtype.itemsize
        for piece in region.part.pieces:
            for start in range(
                piece.offset, stop := piece.offset + piece.stop - piece.start, count
            ):
                files[name].write(
                    backend.to_host(kept[region.number].array[start : min(start + count, stop)])
                )
                moved()
    return files, [
        Stored(name, key, region.name, region.kind, region.part.packed())
        for key, region in regions.items()
    ]


def _model_files(shares: Shares) -> dict[int, str]:
    writers = sorted({joined.writer for joined in shares.tensors.values()})
    return {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        for number, rank in enumerate(writers, 1)
    }


def _key(held: HeldRegion) -> str:
    """Return the key of a region in its file; regions of one rank start at different elements."""
    return (
        f"{held.name}/{held.part.tensor}/{held.part.pieces[0].start}"
        if held.part.tensor
        else held.name
    )


def _finish(
    unfinished: Path,
    target: Path,
    shares: Shares,
    manifest: Manifest,
    keep: int,
    keeps: Callable[[int], bool],
    moved: Callable[[], None],
) -> None:
    names = _model_files(shares)
    index = {
        "metadata": {"total_size": sum(joined.nbytes for joined in shares.tensors.values())},
        "weight_map": {name: names[joined.writer] for name, joined in shares.tensors.items()},
    }
    file = Writing(unfinished / INDEX)
    file.write(json.dumps(index, indent=1).encode())
    manifest = manifest._replace(files={**manifest.files, INDEX: File(0, *file.close())})
    moved()
    write_manifest(unfinished, manifest)
    moved()
    put_in_place(unfinished, target, keep, keeps, moved)


def shared_out(everyone: Sequence[Sequence[HeldRegion]]) -> Shares:
    """Assign the state of all ranks to writers, greedily to the rank with the fewest bytes.

    State that only one rank has is assigned first, then whole parameter tensors, the largest
    first, then replicated state.

    everyone  the regions of each rank
    """
    shares = Shares({}, [[] for _ in everyone], [0] * len(everyone))
    nbytes = shares.nbytes
    tensors: dict[str, Holders] = defaultdict(list)
    states: dict[tuple[str, str], Holders] = defaultdict(list)
    for rank, regions in enumerate(everyone):
        for held in regions:
            if held.name == PARAMETERS:
                tensors[held.part.tensor].append((rank, held))
            elif held.kind == "agreed":
                states[held.name, held.part.tensor].append((rank, held))
            else:
                _give(held, rank, shares)
    for name, holders in tensors.items():
        shares.tensors[name] = Joined(-1, holders[0][1].dtype, holders[0][1].part.shape, holders)
    for name, joined in sorted(shares.tensors.items(), key=lambda item: -item[1].nbytes):
        writer = _least(joined.holders, nbytes)[0]
        nbytes[writer] += joined.nbytes
        shares.tensors[name] = joined._replace(writer=writer)
    for holders in states.values():
        _share_out(holders, shares)
    return shares


def _least(holders: Holders, nbytes: list[int]) -> tuple[int, HeldRegion]:
    return min(holders, key=lambda holder: (nbytes[holder[0]], holder[0]))


def _give(held: HeldRegion, rank: int, shares: Shares) -> None:
    shares.pieces[rank].append(held)
    shares.nbytes[rank] += held.part.length * held.dtype.itemsize


def _share_out(holders: Holders, shares: Shares) -> None:
    """Assign one replicated state tensor to writers, in regions of at most a block."""
    alike: dict[Any, Holders] = defaultdict(list)
    for rank, held in holders:
        alike[
            held.part.rectangles, tuple((piece.start, piece.stop) for piece in held.part.pieces)
        ].append((rank, held))
    taken: dict[Any, list[Piece]] = defaultdict(list)
    for (rectangles, _), group in alike.items():
        left = without(group[0][1].part.pieces, taken[rectangles])
        for unit in cut(left, BLOCK // group[0][1].dtype.itemsize):
            rank, held = _least(group, shares.nbytes)
            enclosing = next(
                piece for piece in held.part.pieces if piece.start <= unit.start < piece.stop
            )
            # `offset` becomes the offset in this rank's array.
            piece = unit._replace(offset=enclosing.offset + unit.start - enclosing.start)
            _give(held._replace(part=held.part._replace(pieces=(piece,))), rank, shares)
        taken[rectangles] += left


def sources(name: str, joined: Joined) -> list[Contribution]:
    """Return which rank contributes which elements: the writer all it has, the next ranks the rest.

    raises  TrainingError, on every rank alike, if an element is on no rank
    """
    ranks = 1 + max(rank for rank, _ in joined.holders)
    taken: dict[Any, list[Piece]] = defaultdict(list)
    contributions, missing = [], prod(joined.shape)
    for rank, held in sorted(
        joined.holders, key=lambda holder: (holder[0] - joined.writer) % ranks
    ):
        part = held.part._replace(
            pieces=tuple(without(held.part.pieces, taken[held.part.rectangles]))
        )
        if missing > 0 and part.pieces:
            contributions.append(Contribution(rank, held.number, runs(part)))
            taken[part.rectangles] += part.pieces
            missing -= part.length
    if missing > 0:
        raise TrainingError(
            f"Every element of {name} must be on a rank, but {missing} of {prod(joined.shape)} are on none.",
            "The checkpoint is not written. This is a fault of mpitrain; please report it.",
        )
    return contributions


def join(
    shares: Shares,
    kept: Sequence[StateBuffer],
    file: Writing | Copies | None,
    transport: Transport,
    backend: Backend,
    moved: Callable[[], None],
) -> None:
    """Gather and write the tensors of this rank to `file`, and send elements to other writers.

    Collective. All ranks go through tensors, windows and sources in the same order, so that the
    first pending message can always be delivered. It takes 2 x MOVED bytes of memory.
    """
    me = transport.rank
    for name, joined in shares.tensors.items():
        if all(rank != me for rank, _ in joined.holders):
            continue
        contributions = sources(name, joined)
        for window in _windows(joined):
            chunk = np.empty(window.length[0] if joined.writer == me else 0, joined.dtype)
            for source in contributions:
                shared = common(source.runs, window)
                if shared.length.size and me in (source.rank, joined.writer):
                    _bring(source, shared, chunk, joined, kept, transport, backend)
            if file:
                file.write(chunk)
                moved()


def _bring(
    source: Contribution,
    shared: Common,
    chunk: np.ndarray,
    joined: Joined,
    kept: Sequence[StateBuffer],
    transport: Transport,
    backend: Backend,
) -> None:
    """Copy or send elements from their source into the writer's chunk.

    shared  `one` has offsets in the source's array, `other` offsets in `chunk`
    """
    if source.rank == transport.rank:
        values = _picked(kept[source.number].array, shared, backend)
        values = values.astype(joined.dtype, copy=False)
    else:
        values = np.empty(shared.length.sum(), joined.dtype)
        transport.recv(values, source.rank)
    if joined.writer != transport.rank:
        transport.send(values, joined.writer)
        return
    done = 0
    for offset, length in zip(shared.other.tolist(), shared.length.tolist(), strict=True):
        chunk[offset : offset + length] = values[done : done + length]
        done += length


def _picked(array: Any, shared: Common, backend: Backend) -> np.ndarray:
    """Copy runs of elements of a backend array to host memory: 1-D, packed."""
    first = int(shared.one.min())
    held = backend.to_host(array[first : int((shared.one + shared.length).max())])
    if len(shared.length) == 1:
        return held
    return np.concatenate(
        [
            held[offset - first : offset - first + length]
            for offset, length in zip(shared.one.tolist(), shared.length.tolist(), strict=True)
        ]
    )


def _windows(joined: Joined) -> Iterator[Runs]:
    length, count = prod(joined.shape), MOVED // joined.dtype.itemsize
    for start in range(0, length, count):
        yield one_run(start, min(count, length - start))
