"""Digests of the training state: one of each tensor over all ranks, and one of each rank."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.parallel.replication.protocol import StateBuffer
from mpitrain.regions import Piece
from mpitrain.run.checkpoint.regions import described, holdings

GRADIENT = "gradient"
"""The name of the buffer of summed gradients, before clipping."""

NBYTES = 8
"""Bytes of a digest: two different states have equal ones by accident once in 2^64."""


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
