"""Parameters that travel coded to where they are used: what is computed with, what is updated, how many bytes travel."""

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, parse_wire
from mpitrain.collectives.group import Group
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import measured
from tests.training import TINY, configured

FORMATS = pytest.mark.parametrize("name", ("fp16", "bf16", "int8"))


@FORMATS
def test_everyone_has_what_each_chunk_is_decoded_to_and_sends_coded_blocks(name):
    codec = CODECS[name]

    def run(transport, length):
        n, rank = transport.size, transport.rank
        array, chunk = (
            np.full((n, length), np.nan, "f4"),
            np.random.default_rng(rank).normal(size=length),
        )
        array[rank] = chunk
        gather = Group(transport, "ring").bind_coded_all_gather(array.reshape(-1), parse_wire(name))
        sent = measured(transport, gather.run)[1]
        again = array.copy()
        array[rank] = chunk
        gather.run()
        assert np.array_equal(again, array)
        return sent, array

    for n, length in ((1, 100), (2, BLOCK), (3, 2 * BLOCK + 16)):
        blocks = -(-length // BLOCK)
        wanted = np.zeros((n, length), np.float32)
        for rank in range(n):
            padded, coded = (
                np.zeros(blocks * BLOCK, np.float32),
                np.empty(blocks * codec.block_bytes, np.uint8),
            )
            padded[:length] = np.random.default_rng(rank).normal(size=length)
            codec.encode(padded, coded)
            codec.decode(coded, padded)
            wanted[rank] = padded[:length]
        for sent, array in run_ranks(n, run, length):
            assert sent == (n - 1) * blocks * codec.block_bytes and np.array_equal(array, wanted)


@FORMATS
@pytest.mark.parametrize(
    "hosts, more", [("aaa", ["replication.overlap=false"]), ("abab", ["replication.shard=host"])]
)
def test_gradients_are_decoded_and_masters_are_never_coded(name, hosts, more):
    """As a replica has them that is given all decoded parameters."""
    plain = [
        *TINY,
        "model.tied=true",
        "optimizer.name=sgd",
        "optimizer.warmup=0",
        "optimizer.weight_decay=0",
    ]

    def run(transport):
        job = build(
            transport, configured(*plain, *more, "replication.zero=3", f"replication.gather={name}")
        )
        coded, whole = job.trainer, build(transport, configured(*plain)).trainer
        for tensor, entry in zip(coded.tensors().values(), whole.storage.entries, strict=True):
            entry.view(whole.parameters)[...] = tensor
        before, began, batch = (
            whole.parameters.copy(),
            coded.parameters.copy(),
            coded.replication.rows.batch(job.data, 0),
        )
        found, wanted = coded.step(0, *batch), whole.step(0, *batch)
        assert (
            abs(found.loss - wanted.loss) <= 1e-5
            and abs(found.grad_norm - wanted.grad_norm) <= 1e-5 * wanted.grad_norm
        )
        coarser = 0
        for start, stop, place in coded.replication.step_end.optimizer.pieces:
            mine = slice(place, place + stop - start)
            changes = coded.parameters[mine] - began[mine], (whole.parameters - before)[start:stop]
            assert np.abs(changes[0] - changes[1]).max() <= 1e-6
            coarser += np.count_nonzero(began[mine] != before[start:stop])
        assert (
            coarser > 1000
            and np.abs(whole.parameters - before).max() > 1e-4
            and replicas_equal(coded)
        )

    run_ranks(len(hosts), run, hosts=hosts)
