"""Quantized all-reduce, pipelined in chains; and an all-gather of encoded chunks.

No element is encoded more often than necessary. Each chunk goes straight to the rank that sums
it, and the encoded sum goes to all ranks. That rank decodes its own sum too, so that all ranks
have the same bits.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.collectives.engine.codecs import BLOCK, Codec
from mpitrain.collectives.engine.compose import Chain, LocalReduction, PipelinedChain
from mpitrain.collectives.engine.executor import WINDOW, Execution, Reduction
from mpitrain.collectives.plans import pairwise
from mpitrain.collectives.plans.steps import Plan, at_once
from mpitrain.transport.base import Transport

LANE = 30 << 10
"""Elements of a rank's chunk that are encoded at a time, while others are sent.

In a format of two bytes per element, they fill one message between hosts.
"""


def bind_coded(transport: Transport, array: np.ndarray, codec: Codec, tag: int) -> PipelinedChain:
    """Bind a sum that encodes every element separately.

    traffic  2 (n - 1) encoded chunks per chain: LANE elements, but ceil(rest / n) elements,
             rounded up to blocks, in the last chain
    """
    n, most = transport.size, transport.size * LANE
    lanes = [array[start : start + most] for start in range(0, array.size, most)] or [array]
    width = min(len(lanes), max(2, 2 * WINDOW // n))
    tags = [tag, *(transport.claim_tag() for _ in range(2 * width - 1))]
    desks = [Workspace(lanes[0], n, codec, tags[2 * i : 2 * i + 2]) for i in range(width)]
    return PipelinedChain(
        transport,
        [links(transport, part, codec, desks[i % width]) for i, part in enumerate(lanes)],
        width,
        sum(desk.nbytes for desk in desks),
    )


class Workspace:
    """Scratch and tags of one chain; a later chain may reuse them.

    values              n chunks of whole blocks, float32
    scratch             one such chunk
    outgoing, incoming  encoded chunks to and from all ranks
    """

    def __init__(self, part: np.ndarray, n: int, codec: Codec, tags: Sequence[int]):
        self.tags = tags
        blocks = n * -(-part.size // (n * BLOCK))
        self.values, self.scratch = (
            np.empty_like(part, shape=count * BLOCK) for count in (blocks, blocks // n)
        )
        self.outgoing, self.incoming = (
            np.empty_like(part, np.uint8, shape=blocks * codec.block_bytes) for _ in range(2)
        )
        self.nbytes = sum(
            array.nbytes for array in (self.values, self.scratch, self.outgoing, self.incoming)
        )


def links(transport: Transport, part: np.ndarray, codec: Codec, desk: Workspace) -> list[Reduction]:
    """Return the reductions that one chain runs in turn, called its links.

    They scatter encoded chunks, sum them, gather the encoded sums and decode these.

    part  the region of the array that the chain sums
    desk  the scratch and tags of the chain
    """
    rank, n = transport.rank, transport.size
    blocks = -(-part.size // (n * BLOCK))
    flat, scratch = desk.values[: n * blocks * BLOCK], desk.scratch[: blocks * BLOCK]
    values = flat.reshape(n, -1)
    outgoing, incoming = (
        buffer[: n * blocks * codec.block_bytes].reshape(n, -1)
        for buffer in (desk.outgoing, desk.incoming)
    )
    others = [(rank + step) % n for step in range(1, n)]

    def scatter() -> None:
        flat[: part.size] = part
        flat[part.size :] = 0
        for peer in others:
            codec.encode(values[peer], outgoing[peer])

    def gather() -> None:
        for peer in others:
            codec.add(incoming[peer], values[rank], scratch)
        codec.encode(values[rank], incoming[rank])

    def finish() -> None:
        for owner in range(n):
            codec.decode(incoming[owner], values[owner])
        part[:] = flat[: part.size]

    plans = (
        without_self(pairwise.all_to_all(rank, n, incoming.size), rank),
        pairwise.all_gather(rank, n, incoming.size),
    )
    # All messages are in flight at once: a rank that encodes late then delays no other exchange.
    to_all, from_all = (
        Execution(transport, incoming, "add", at_once(plan), tag, source)
        for plan, tag, source in zip(plans, desk.tags, (outgoing, incoming), strict=True)
    )
    return [
        LocalReduction(scatter),
        to_all,
        LocalReduction(gather),
        from_all,
        LocalReduction(finish),
    ]


def without_self(plan: Plan, rank: int) -> Plan:
    """Return the plan without the transfers of a rank to itself."""
    return plan._replace(
        steps=tuple(step for step in plan.steps if all(t.peer != rank for t in step.sends))
    )


def bind_coded_all_gather(
    transport: Transport, array: np.ndarray, codec: Codec, bind: Callable[[np.ndarray], Reduction]
) -> Chain:
    """Bind an all-gather of encoded chunks: chunk r of rank r ends, decoded, in every rank's array.

    Rank r also decodes its own chunk, so that all ranks have the same bits.

    array    float32; its size divides into one chunk per rank
    bind     binds an all-gather of bytes
    traffic  of an all-gather of n chunks, each rounded up to blocks and encoded
    """
    chunks = array.reshape(transport.size, -1)
    length = chunks.shape[1]
    blocks = -(-length // BLOCK)
    values = np.empty_like(array, shape=blocks * BLOCK)
    coded = np.empty_like(array, np.uint8, shape=transport.size * blocks * codec.block_bytes)
    parts = coded.reshape(transport.size, -1)

    def encode() -> None:
        values[:length] = chunks[transport.rank]
        values[length:] = 0
        codec.encode(values, parts[transport.rank])

    def decode() -> None:
        for chunk, part in zip(chunks, parts, strict=True):
            codec.decode(part, values)
            chunk[:] = values[:length]

    return Chain(
        transport,
        [LocalReduction(encode), bind(coded), LocalReduction(decode)],
        values.nbytes + coded.nbytes,
    )
