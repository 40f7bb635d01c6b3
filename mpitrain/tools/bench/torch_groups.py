"""PyTorch's process groups, one for each backend, and its collectives as rows of the benchmark."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.transport.base import Transport

_GROUPS: dict[str, Any] = {}


def process_group(transport: Transport, backend: str) -> Any:
    """Return the process group of all ranks over a backend, the same one on each call. Collective.

    The first one becomes PyTorch's default group. Backend mpitrain opens no socket.
    """
    if backend == "mpitrain":
        import mpitrain.torch  # noqa: F401  registers it
    if not dist.is_initialized():
        _GROUPS.clear()
        ranks = {} if backend == "mpitrain" else _by_tcp(transport)
        dist.init_process_group(backend, **ranks)
        _GROUPS[backend] = dist.group.WORLD
    if backend not in _GROUPS:
        _GROUPS[backend] = dist.new_group(backend=backend)
    return _GROUPS[backend]


def _by_tcp(transport: Transport) -> dict[str, Any]:
    host, rank, size, store = transport.hosts[0], transport.rank, transport.size, None
    if rank == 0:
        store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
    port = transport.gather_text(store.port if store else 0)[0]
    store = store or dist.TCPStore(host, port, size, is_master=False)
    return {"store": store, "rank": rank, "world_size": size}


def bind(
    backend: str,
    operation: str,
    transport: Transport,
    array: Any,
    other: Any,
    counts: Sequence[int] = (),
) -> Callable[[], None]:
    """Return a function that runs PyTorch's collective on these arrays, as `Buffers` have them. Collective.

    counts  as in `bind_native`
    """
    group, rank, last = process_group(transport, backend), transport.rank, transport.size - 1
    whole, second = tensor_of(array), tensor_of(other)
    own = whole[slice(*chunk_bounds(len(whole), transport.size)[rank])]
    calls = {
        "allreduce": partial(dist.all_reduce, whole),
        "reduce-scatter": partial(dist.reduce_scatter_single, second, whole),
        "all-gather": partial(dist.all_gather_single, whole, own),
        "broadcast": partial(dist.broadcast, whole, 0),
        "reduce": partial(dist.reduce, whole, 0),
        "all-to-all": partial(dist.all_to_all_single, whole, second),
    }
    call = partial(_all_to_all_of, whole, second, counts) if counts else calls.get(operation)

    def run() -> None:
        if call:
            call(group=group)
        elif last and rank in (0, last):  # a ping-pong
            turns = [dist.send, dist.recv] if rank == 0 else [dist.recv, dist.send]
            for turn in turns:
                turn(whole, last - rank, group=group)
        if whole.is_cuda:
            torch.cuda.synchronize()

    return run


def _all_to_all_of(
    whole: torch.Tensor, second: torch.Tensor, counts: Sequence[int], group: Any
) -> None:
    """Tell the counts, then send the parts, as a program with experts does."""
    mine = torch.tensor(counts, device=whole.device)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    received = theirs.tolist()
    dist.all_to_all_single(
        whole[: sum(received)], second[: sum(counts)], received, [*counts], group=group
    )


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor in the memory of an array."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
