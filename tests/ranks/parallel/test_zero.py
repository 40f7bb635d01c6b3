"""ZeRO: the curve of one rank, bytes held and sent as formulas say; also within each host, and with coded gathers."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, parse_wire
from mpitrain.collectives.group import Group
from mpitrain.errors import ConfigError
from mpitrain.parallel.buckets import TURNS
from mpitrain.parallel.modes import MODES, ZERO
from mpitrain.parallel.zero import Zero3
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import ThreadTransport, run_ranks
from tests.laws.collectives import measured
from tests.ranks.parallel.test_replication import everything
from tests.rows import replaced
from tests.training import TINY, configured, curves, near

pytestmark = pytest.mark.slow
BASE = [*TINY, "precision.compute=float64"]
TIED, RING = "model.tied=true", "replication.algorithm=ring"
THREE, TWO = "batch.micro_batches=3", "batch.micro_batches=2"
STAGES = pytest.mark.parametrize("stage", (2, 3))
SHORT = 6


def zero(stage):
    return f"replication.zero={stage}"


def by_host(stage):
    return [zero(stage), "replication.shard=host"]


alone = cache(lambda steps, *settings: curves(1, *BASE, *settings, steps=steps))


class Strict(Zero3):
    """Parameters are gone after each poll, and what was summed in a slot is."""

    now_open = 0

    def open(self, unit, micro):
        self.now_open, weights = unit, super().open(unit, micro)
        self.sync()
        return weights

    def poll(self):
        super().poll()
        for bucket in self._needed[self.now_open]:
            self.parameter_slots.views[bucket].fill(np.nan)
            self._there.pop(self.parameter_slots.slot[bucket], None)
        for slot, (bucket, _) in [*self._under_way.items()]:
            self._end(slot)
            self.gradient_slots.views[bucket].fill(np.nan)


@pytest.mark.parametrize("mode", (ZERO[2], ZERO[3], Strict, MODES["master"]))
def test_evaluation_logits_and_text_are_those_of_one_rank(mode):
    settings = [TIED, "batch.micro_batches=2"]
    (one,) = run_ranks(1, everything, settings)
    with replaced(MODES, "all-reduce", mode):
        assert all(near(one, found) for found in run_ranks(3, everything, settings))


@STAGES
@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("settings", [[], [TIED]])
def test_a_rank_holds_its_part_and_what_is_on_its_way(settings, ranks, stage):
    def run(transport):
        trainer = build(
            transport, configured(*TINY, *settings, zero(stage), "replication.bucket_mb=0.000001")
        ).trainer
        mode, storage = trainer.replica, trainer.storage
        state = sum(buffer.nbytes for buffer in mode.optimizer.state.values())
        sizes = [4 * (span.stop - span.start) for span in storage.spans]
        turning = sizes[1:] if settings else sizes
        slots = sum(max(turning[turn::TURNS]) for turn in range(TURNS)) + sum(sizes) - sum(turning)
        assert mode.gradient_slots.flat.nbytes == slots
        if stage == 3:
            assert mode.parameter_slots.flat.nbytes == slots
        return storage.length, mode.parameters.nbytes + mode.gradient_buffer.nbytes + state

    for length, held in run_ranks(ranks, run):
        assert held * ranks == length * ({2: 4 * ranks + 12, 3: 16}[stage])


@STAGES
@pytest.mark.parametrize(
    "settings, micro_batches", [([], 1), ([], 3), ([TIED], 2), (["replication.zero_keep=1200"], 2)]
)
def test_by_ring_a_rank_sends_what_the_formulas_say(settings, micro_batches, stage):
    n, m = 3, micro_batches

    def run(transport):
        config = configured(
            *TINY, *settings, zero(stage), f"batch.micro_batches={m}", "replication.algorithm=ring"
        )
        job = build(transport, config)
        trainer, mode = job.trainer, job.trainer.replica
        told = measured(trainer.transport, lambda: mode.total(0, 0, 0, 0))[1]
        batch = mode.batch(job.data, 0)
        trainer.step(0, *batch)
        sent = measured(trainer.transport, lambda: trainer.step(1, *batch))[1]
        sizes = [4 * (span.stop - span.start) for span in trainer.storage.spans]
        counts = [
            sum(e.stop - e.start for e in trainer.storage.entries if e.unit == unit)
            for unit in range(len(sizes))
        ]
        return sent - told, sizes, counts

    for sent, sizes, counts in run_ranks(n, run):
        whole = sum(sizes)
        travelled = {2: (m + 1) * whole, 3: 3 * m * whole}[stage]
        if stage == 3:
            stays = [
                unit == 0 if TIED in settings else bool(settings) and count <= 1200
                for unit, count in enumerate(counts)
            ]
            assert any(stays) == bool(settings) and not all(stays)
            turning = [size for size, stay in zip(sizes, stays, strict=True) if not stay]
            travelled -= (
                (2 * m - 1) * (whole - sum(turning))
                + m * sum(turning[-TURNS:])
                + (m - 1) * sum(turning[:TURNS])
            )
        assert sent * n == travelled * (n - 1)


@STAGES
def test_after_the_first_step_nothing_is_bound_or_allocated(stage):
    def run(transport):
        job = build(transport, configured(*TINY, TIED, zero(stage), "batch.micro_batches=2"))
        trainer = job.trainer
        trainer.step(0, *trainer.replica.batch(job.data, 0))
        held, mode = trainer.arena.allocations, trainer.replica
        for transport in (
            trainer.grid.transport,
            *(group.transport for group in mode.shards.groups[""]),
        ):
            transport.claim_tag = transport.allocate = None
        for index in (1, 2):
            trainer.step(index, *trainer.replica.batch(job.data, index))
        return trainer.arena.allocations - held, trainer.arena.live

    assert run_ranks(2, run) == [(0, 0)] * 2


@pytest.mark.parametrize("wire", ["int8", "topk:0.1"])
def test_in_a_wire_format_the_curve_is_that_of_all_reduce(wire):
    base = [*TINY, f"replication.wire={wire}", "optimizer.clip=0"]
    (losses, norms, parameters), divided = (
        curves(3, *base, *more, steps=SHORT) for more in ([], [zero(1)])
    )
    assert np.array_equal(losses, divided[0]) and np.array_equal(parameters, divided[2])
    assert np.all(np.abs(norms - divided[1]) <= 1e-6 * norms), "squares are summed in another order"


@pytest.mark.parametrize("hosts", ("aabb", "abab", "aaabbb", "abc", "aa"))
def test_between_hosts_a_rank_sends_only_its_gradients_once_a_step(hosts, monkeypatch):
    """By a ring; s ranks on each of h hosts, m micro-batches."""
    n, h, m = len(hosts), len(set(hosts)), 2
    s = n // h
    crossed, send = Counter(), ThreadTransport.start_send

    def counted(self, array, to, tag=0):
        if self.hosts[to] != self.hosts[self.rank]:
            crossed[self.me] += array.nbytes
        return send(self, array, to, tag)

    def run(transport, stage):
        job = build(transport, configured(*TINY, *by_host(stage), RING, f"batch.micro_batches={m}"))
        trainer, mode = job.trainer, job.trainer.replica
        batch, told = mode.batch(job.data, 0), []
        trainer.step(0, *batch)
        mode.sync()
        transport.barrier()
        for work in (
            lambda: mode.total(0, 0, 0, 0),
            lambda: (trainer.step(1, *batch), mode.sync()),
        ):
            before = crossed[transport.rank]
            sent = measured(transport, work)[1]
            told.append((sent, crossed[transport.rank] - before))
            transport.barrier()
        (control, control_crossed), (sent, between) = told
        state = sum(buffer.nbytes for buffer in mode.optimizer.state.values())
        held = state, mode.gradient_buffer.nbytes, mode.parameters.nbytes
        between -= control_crossed
        return (
            between,
            sent - control - between,
            held,
            [4 * (span.stop - span.start) for span in trainer.storage.spans],
        )

    monkeypatch.setattr(ThreadTransport, "start_send", counted)
    for stage in (1, 2, 3):
        for between, within, held, sizes in run_ranks(n, run, stage, hosts=hosts):
            whole = sum(sizes)
            assert between * n == 2 * (h - 1) * whole, stage
            travelled = {
                1: 2 * whole,
                2: (m + 1) * whole,
                3: 3 * m * whole - m * sum(sizes[-2:]) - (m - 1) * sum(sizes[:2]),
            }
            assert within * s == travelled[stage] * (s - 1), stage
            assert [
                size * (s if stage >= level else 1)
                for size, level in zip(held, (1, 2, 3), strict=True)
            ] == [2 * whole, whole, whole], stage


def test_what_the_hosts_hold_alike_is_noticed_if_it_differs():
    def run(transport):
        trainer = build(transport, configured(*TINY, *by_host(3))).trainer
        was = replicas_equal(trainer)
        trainer.parameters[transport.rank // 3] += transport.rank // 3
        return was, replicas_equal(trainer)

    assert run_ranks(4, run, hosts="abab") == [(True, False)] * 4


def test_hosts_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(
        ConfigError, match=r"shard host .* but there are 2 on a, 1 on b\.\nStart as many"
    ) as refused:
        run_ranks(
            3, lambda transport: build(transport, configured(*TINY, *by_host(2))), hosts="aba"
        )
    assert refused.value.agreed


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
            coded.replica.batch(job.data, 0),
        )
        found, wanted = coded.step(0, *batch), whole.step(0, *batch)
        assert (
            abs(found.loss - wanted.loss) <= 1e-5
            and abs(found.grad_norm - wanted.grad_norm) <= 1e-5 * wanted.grad_norm
        )
        coarser = 0
        for start, stop, place in coded.replica.optimizer.pieces:
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
