"""Comparison of the state of ranks: whether replicas have the same bits, and digests of tensors."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpitrain.layers.flat import Storage
from mpitrain.machine.backend import Backend
from mpitrain.optim.optimizer import StateBuffer
from mpitrain.regions import Piece
from mpitrain.run.checkpoint.regions import HeldRegion, described, holdings
from mpitrain.run.trainer import Trainer

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
    kept = [buffer for buffer in trainer.replica.state() if buffer.name == "parameters"]
    own = [
        (str(held.part.packed()), digest)
        for held, digest in _digested(trainer.storage, kept, trainer.backend)
    ]
    everyone = trainer.transport.gather_text(own)
    distinct = {tuple(entry) for entries in everyone for entry in entries}
    return len(distinct) == len({region for region, _ in distinct})


def state_digests(trainer: Trainer) -> dict[str, str]:
    """Return {buffer/tensor: digest} of this rank's state and summed gradients; collective."""
    trainer.sync_parameters()
    kept = [*gradients(trainer.replica.summed), *trainer.replica.state()]
    return digests(trainer.storage, kept, trainer.backend)


def gradients(summed: Mapping[Piece, Any]) -> list[StateBuffer]:
    """Return the summed gradients of this rank as buffers, for `digests`.

    summed  {piece of the flat buffer: its gradients}, of a `Replica`
    """
    return [
        StateBuffer(GRADIENT, array, [Piece(piece.start, piece.stop, 0)])
        for piece, array in summed.items()
    ]


def digests(storage: Storage, state: Sequence[StateBuffer], backend: Backend) -> dict[str, str]:
    """Return {buffer/tensor: digest} of the elements on this rank; it reads all of them.

    state  of this rank, after `sync_parameters`
    """
    parts = defaultdict(list)
    for held, digest in _digested(storage, state, backend):
        parts[f"{held.name}/{held.part.tensor}"].append(digest)
    return {
        name: digest[0] if len(digest) == 1 else _digest(digest) for name, digest in parts.items()
    }


def _digested(
    storage: Storage, state: Sequence[StateBuffer], backend: Backend
) -> Iterator[tuple[HeldRegion, str]]:
    """Yield each region of the state on this rank, and the digest of its elements."""
    for held in holdings(described(storage, state)):
        digest, array = hashlib.blake2b(digest_size=NBYTES), state[held.number].array
        for piece in held.part.pieces:
            stop = piece.offset + piece.stop - piece.start
            digest.update(backend.to_host(array[piece.offset : stop]).tobytes())
        yield held, digest.hexdigest()


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
