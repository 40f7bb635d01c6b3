"""Comparison of the state of ranks: whether replicas have the same bits, and digests of tensors."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.protocol import StateBuffer
from mpitrain.regions import Piece, within
from mpitrain.run.checkpoint.regions import described, holdings
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Transport

GRADIENT = "gradient"
"""The name of the buffer of summed gradients, before clipping."""

NBYTES = 8
"""Bytes of a digest: two different states have equal ones by accident once in 2^64."""


def replicas_equal(trainer: Trainer) -> bool:
    """Return whether every replicated tensor has the same bits on all its ranks; collective.

    Parameters
    ----------
    trainer : Trainer
        `sync_parameters` of it is called first.

    Returns
    -------
    bool
        The same on every rank.
    """
    trainer.sync_parameters()
    grid = trainer.grid
    parameters, *others = [k for k in trainer.replication.kept() if k.name == "parameters"]
    flat = trainer.backend.to_host(parameters.array)
    equal = _same_bits(grid.copies.transport, parameters.pieces, flat)
    for frozen in others:
        equal &= _same_bits(
            grid.copies.transport, frozen.pieces, trainer.backend.to_host(frozen.array)
        )
    for name, holders in sorted(grid.holders.items()):
        for span in trainer.storage.spans:
            if span.holders == name:
                own = list(within(parameters.pieces, span.start, span.stop))
                equal &= _same_bits(holders.transport, own, flat, span.start)
    if grid.axes.servers:
        served = trainer.transport.gather_text(parameters.pieces)[-grid.axes.servers :]
        # A worker's buffer is not sharded. So a piece [start, stop) of the flat parameter buffer
        # is at offset `start` of the worker's array.
        whole = [Piece(start, stop, start) for pieces in served for start, stop, _ in pieces]
        equal &= _same_bits(trainer.transport, parameters.pieces if grid.is_server else whole, flat)
    return all(trainer.transport.gather_text(equal))


def _same_bits(
    transport: Transport, pieces: Sequence[Piece], array: np.ndarray, origin: int = 0
) -> bool:
    """Return whether equal pieces have equal bits on all ranks; collective.

    origin  subtracted from `start` and `stop` of each piece before ranks compare them
    """
    held = [
        (
            start - origin,
            stop - origin,
            hashlib.sha256(array[offset : offset + stop - start].tobytes()).hexdigest(),
        )
        for start, stop, offset in pieces
    ]
    distinct = {tuple(entry) for entries in transport.gather_text(held) for entry in entries}
    return len(distinct) == len({(start, stop) for start, stop, _ in distinct})


def state_digests(trainer: Trainer) -> dict[str, str]:
    """Return {buffer/tensor: digest} of this rank's state and summed gradients; collective."""
    trainer.sync_parameters()
    kept = [*gradients(trainer.replication.reducer.summed), *trainer.replication.kept()]
    return digests(trainer.storage, kept, trainer.backend)


def gradients(summed: Mapping[Piece, Any]) -> list[StateBuffer]:
    """Return the summed gradients of this rank as buffers, for `digests`.

    summed  {piece of the flat buffer: its gradients}, of a `GradientReducer`
    """
    return [
        StateBuffer(GRADIENT, array, [Piece(piece.start, piece.stop, 0)])
        for piece, array in summed.items()
    ]


def digests(storage: Storage, state: Sequence[StateBuffer], backend: Backend) -> dict[str, str]:
    """Return {buffer/tensor: digest} of the elements on this rank; it reads all of them.

    state  of this rank, after `sync_parameters`
    """
    hashes: dict[str, Any] = {}
    for held in holdings(described(storage, state)):
        name, array = f"{held.name}/{held.part.tensor}", state[held.number].array
        digest = hashes.setdefault(name, hashlib.blake2b(digest_size=NBYTES))
        for piece in held.part.pieces:
            stop = piece.offset + piece.stop - piece.start
            digest.update(backend.to_host(array[piece.offset : stop]).tobytes())
    return {name: digest.hexdigest() for name, digest in hashes.items()}


def digest_record(everyone: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the record of all ranks for metrics.jsonl.

    everyone  the results of `digests`, by rank
    returns   "tensors": {buffer/tensor: digest over the ranks that have elements of it},
              "ranks": digest of each rank
    """
    tensors = defaultdict(list)
    for of_rank in everyone:
        for name, digest in of_rank.items():
            tensors[name].append(digest)
    return {
        "tensors": {name: _digest(parts) for name, parts in sorted(tensors.items())},
        "ranks": [
            _digest([f"{name} {digest}" for name, digest in of_rank.items()])
            for of_rank in everyone
        ],
    }


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=NBYTES).hexdigest()
