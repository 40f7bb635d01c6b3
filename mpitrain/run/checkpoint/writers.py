"""Assignment of the elements of a checkpoint to writers, balanced by bytes.

Each element is written once. Its writer has it already, or gathers the whole tensor.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import TrainingError
from mpitrain.formats.safetensors_files import BLOCK, MOVED, Writing
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.state import StateBuffer
from mpitrain.regions import Common, Piece, Runs, common, cut, one_run, without
from mpitrain.run.checkpoint.regions import HeldRegion, runs
from mpitrain.transport.base import Transport

PARAMETERS = "parameters"
"""The name of the `StateBuffer` that is written as whole tensors."""

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
        """The bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Shares(NamedTuple):
    """The assignment of all elements to writers; the same on all ranks.

    tensors  whole parameter tensors by full name, with their writers
    pieces   for each rank, the regions of its own state that it writes
    """

    tensors: dict[str, Joined]
    pieces: list[list[HeldRegion]]


class Contribution(NamedTuple):
    """The elements of a tensor that one rank contributes.

    number  index of the `StateBuffer` on that rank
    runs    the elements, and their offsets in its array
    """

    rank: int
    number: int
    runs: Runs


def shared_out(everyone: Sequence[Sequence[HeldRegion]]) -> Shares:
    """Assign the state of all ranks to writers, greedily to the rank with the fewest bytes.

    State that only one rank has is assigned first, then whole parameter tensors, the largest
    first, then replicated state.

    everyone  the regions of each rank
    """
    nbytes = [0] * len(everyone)
    shares = Shares({}, [[] for _ in everyone])
    tensors: dict[str, Holders] = defaultdict(list)
    states: dict[tuple[str, str], Holders] = defaultdict(list)
    for rank, holdings in enumerate(everyone):
        for held in holdings:
            if held.name == PARAMETERS:
                tensors[held.part.tensor].append((rank, held))
            elif held.kind == "agreed":
                states[held.name, held.part.tensor].append((rank, held))
            else:
                _give(held, rank, shares, nbytes)
    for name, holders in tensors.items():
        shares.tensors[name] = Joined(-1, holders[0][1].dtype, holders[0][1].part.shape, holders)
    for name, joined in sorted(shares.tensors.items(), key=lambda item: -item[1].nbytes):
        writer = _least(joined.holders, nbytes)[0]
        nbytes[writer] += joined.nbytes
        shares.tensors[name] = joined._replace(writer=writer)
    for holders in states.values():
        _share_out(holders, shares, nbytes)
    return shares


def _least(holders: Holders, nbytes: list[int]) -> tuple[int, HeldRegion]:
    return min(holders, key=lambda holder: (nbytes[holder[0]], holder[0]))


def _give(held: HeldRegion, rank: int, shares: Shares, nbytes: list[int]) -> None:
    shares.pieces[rank].append(held)
    nbytes[rank] += held.part.length * held.dtype.itemsize


def _share_out(holders: Holders, shares: Shares, nbytes: list[int]) -> None:
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
            rank, held = _least(group, nbytes)
            enclosing = next(
                piece for piece in held.part.pieces if piece.start <= unit.start < piece.stop
            )
            # `offset` becomes the offset in this rank's array.
            piece = unit._replace(offset=enclosing.offset + unit.start - enclosing.start)
            _give(held._replace(part=held.part._replace(pieces=(piece,))), rank, shares, nbytes)
        taken[rectangles] += left


def sources(name: str, joined: Joined) -> list[Contribution]:
    """Return the sources of a tensor: first its writer, then the following ranks for the rest.

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


PIECE = "a piece of the checkpoint"
"""The name of the record of each write."""


def join(
    shares: Shares,
    kept: Sequence[StateBuffer],
    file: Writing | None,
    transport: Transport,
    backend: Backend,
) -> None:
    """Gather and write the tensors of this rank to `file`, and send elements to other writers.

    Collective. All ranks go through tensors, windows and sources in the same order. So the first
    pending message can always be delivered, and ranks cannot deadlock.

    file    the open safetensors file of this rank; None if it writes no tensor
    memory  2 x MOVED bytes, and the runs of one tensor
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
                with transport.recorder.working(PIECE):
                    file.write(chunk)


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

    shared  runs of elements to copy: `shared.one` has their offsets in the source's array,
            `shared.other` their offsets in `chunk`, and `shared.length` their lengths
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
    """Iterate over windows of the flattened tensor, of at most MOVED bytes each."""
    length, count = prod(joined.shape), MOVED // joined.dtype.itemsize
    for start in range(0, length, count):
        yield one_run(start, min(count, length - start))
