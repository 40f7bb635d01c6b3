"""Parameter servers: runs repeat bitwise; what each rank holds and sends. Their curve is that of one rank (test_matrix.py)."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.layers.flat import Span, dealt
from mpitrain.parallel.servers import header
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import measured
from tests.training import TINY, configured, curves, same, stepped

SERVER, SHORT = "replication.mode=server", 6
pytestmark = pytest.mark.slow


def served(transport, config, steps):
    """Losses and norms, the pieces of the parameters that this rank holds, what an evaluation says, and the storage."""
    trainer, source, _ = build(transport, config)
    results = stepped(trainer, source, range(steps))
    assert replicas_equal(trainer)
    validated = trainer.evaluate(source)
    parameters = next(kept for kept in trainer.replica.state() if kept.name == "parameters")
    pieces = {
        p.start: parameters.array[p.offset : p.offset + p.stop - p.start].copy()
        for p in parameters.pieces
    }
    told = np.array([o.loss for o in results]), np.array([o.grad_norm for o in results])
    return told, pieces, validated, trainer.storage


def curve(workers, servers, *settings):
    """What all ranks saw, which must be one, and the servers' parameters are what the workers hold."""
    config = configured(*settings, SERVER, f"replication.servers={servers}")
    every = run_ranks(workers + servers, served, config, SHORT)
    told, pieces, validated, storage = every[0]
    (whole,), count = pieces.values(), 0
    for rank, (others, pieces, others_validated, _) in enumerate(every):
        assert same(others, told) and others_validated == validated
        for start, values in pieces.items():
            assert np.array_equal(values, whole[start : start + len(values)])
            count += len(values) if rank >= workers else 0
    assert count == len(whole), "each element lies on one server"
    return *told, np.concatenate([e.view(whole).ravel() for e in storage.entries])


def test_a_run_repeats_bitwise_and_one_worker_has_the_bits_of_one_rank():
    assert same(*(curve(3, 2, *TINY) for _ in range(2)))
    settings = [*TINY, "optimizer.clip=0"]
    alone, found = curves(1, *settings, steps=SHORT), curve(1, 1, *settings)
    assert np.array_equal(alone[0], found[0]) and np.array_equal(alone[2], found[2])


@pytest.mark.parametrize("settings", [[], ["replication.overlap=false"], ["batch.micro_batches=2"]])
def test_a_unit_is_pushed_while_those_before_it_compute_and_the_bits_stay(settings):
    def pushed(transport):
        """How many pushes have begun, when the backward pass of each unit ends, of the last micro-batch of a step."""
        trainer, source, _ = build(
            transport, configured(*TINY, SERVER, "replication.servers=2", *settings)
        )
        replica, counts, before = trainer.replica, [], transport.traffic.messages
        ready = replica.ready

        def noted(unit, is_last):
            ready(unit, is_last)
            if is_last:
                counts.append(transport.traffic.messages - before)

        replica.ready = noted
        outcome = trainer.step(0, *replica.batch(source, 0))
        return counts, outcome._replace(comm_s=0), trainer.parameters.copy()

    one, _, *servers = every = run_ranks(4, pushed)
    units = len(one[0])
    assert units > 3 and one[0] == (
        [0] * units if "replication.overlap=false" in settings else [*range(1, units + 1)]
    )
    assert all(other[1] == one[1] for other in every) and not servers[0][0]
    if settings == ["replication.overlap=false"]:
        overlapped = configured(*TINY, SERVER, "replication.servers=2")
        assert np.array_equal(one[2], run_ranks(4, served, overlapped, 1)[0][1][0])


@pytest.mark.parametrize("update", ("sync", "async"))
def test_a_bit_that_differs_on_a_server_alone_is_found(update):
    def altered(transport, rank):
        trainer, *_ = build(
            transport,
            configured(*TINY, SERVER, "replication.servers=2", f"replication.update={update}"),
        )
        before = replicas_equal(trainer)
        if transport.rank == rank:
            trainer.replica.parameters[-1] += 1
        return before, replicas_equal(trainer)

    for rank in (0, 3):
        assert run_ranks(4, altered, rank) == [(True, False)] * 4


def test_whole_spans_are_dealt_by_size_and_neighbours_are_one_piece():
    lengths = ((0, 50), (50, 60), (60, 60), (60, 90), (90, 100))
    spans = [Span(start, stop, unit, "", False) for unit, (start, stop) in enumerate(lengths)]
    assert dealt(spans, 1) == [[(0, 100, 0)]]
    assert dealt(spans, 2) == [[(0, 50, 0)], [(50, 100, 0)]]
    assert dealt(spans, 3) == [[(0, 50, 0)], [(60, 90, 0)], [(50, 60, 0), (90, 100, 10)]]
    assert [len(pieces) for pieces in dealt(spans, 7)].count(0) == 3


@pytest.mark.parametrize("workers, servers", [(2, 1), (3, 2)])
def test_workers_push_gradients_and_servers_alone_have_state(workers, servers):
    def run(transport):
        trainer, source, _ = build(
            transport, configured(*TINY, SERVER, f"replication.servers={servers}")
        )
        stepped(trainer, source, [0])
        _, sent = measured(transport, lambda: stepped(trainer, source, [1]))
        names = [kept.name for kept in trainer.replica.state()]
        return sent, trainer.parameters.nbytes, trainer.grid.is_server, names, trainer.arena.peak

    every = run_ranks(workers + servers, run)
    whole = every[0][1]
    for sent, nbytes, is_server, names, peak in every:
        if not is_server:
            pushed = whole + servers * header().nbytes
            assert (sent, nbytes, names) == (pushed, whole, ["parameters"]) and peak
            continue
        agreeing = sent - workers * (
            nbytes + header().nbytes
        )  # three numbers, and a few bytes of the algorithm's own
        assert 0 <= agreeing <= 64 * (servers - 1)
        assert names == ["parameters", "first_moment", "second_moment"]
    assert sum(found[1] for found in every[workers:]) == whole
    assert max(found[1] for found in every[workers:]) < 0.75 * whole or servers == 1


@pytest.mark.parametrize("setting", ["replication.wire=int8", "replication.zero=1"])
def test_what_divides_or_codes_is_refused_beside_servers(setting):
    key, value = setting.split("=")
    with pytest.raises(ConfigError, match=f"Mode server needs {key} .*, but it is {value}"):
        configured(SERVER, setting)
