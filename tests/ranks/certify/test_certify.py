"""certify on threads with pretended hosts: sound nodes pass, and each planted fault is named."""

import threading
import time

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.tools.bench import pairs as measuring
from mpitrain.tools.bench.kernels.host_products import sampler
from mpitrain.tools.certify import collect as collecting
from mpitrain.tools.certify.collect import collect, links, measure, repeat, step_digests
from mpitrain.tools.certify.verdict import Jobs, Limits, Speeds, judge
from mpitrain.tools.doctor import probes
from mpitrain.tools.doctor.facts import Facts
from mpitrain.tools.doctor.probes import PROBES, Problem, Values
from mpitrain.transport.threads import ThreadTransport, run_ranks

HOSTS = "abcd"


def rank_here():
    return int(threading.current_thread().name.removeprefix("rank "))


def certificate(folder, rates=(1e11,) * 4, findings=()):
    """The certificate of four pretended nodes whose ranks sample these rates."""
    fact = Facts("", "m", [0], 1, "CPU", "", 1, 1 << 30, 1 << 33)

    def one(transport):
        *partial, evidence = collect(
            transport,
            Limits(),
            folder,
            5,
            lambda: (rates[transport.rank], 1e10),
            lambda: [Problem(*each) for each in findings],
            {},
            lambda host: fact._replace(host=host, machine=host),
        )
        verdicts = [judge(known, Limits()) for known in (*partial, evidence)]
        assert [bool(verdict.awaits) for verdict in verdicts] == [True] * 6 + [False]
        return verdicts[-1], evidence

    everyone = run_ranks(4, one, hosts=HOSTS)
    assert all(found == everyone[0] for found in everyone)
    return everyone[0]


def bad(verdict):
    return "".join(node.node for node in verdict.nodes if node.reasons)


def test_sound_nodes_pass_and_a_slow_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "links", lambda transport: [])  # they have tests of their own
    found, evidence = certificate(tmp_path / "work")
    assert found.passes and evidence.collectives > 40 and not evidence.wrong
    assert len(set(evidence.jobs[:3])) == 1 and len(set(evidence.steps)) == 1
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(collecting, "repeat", lambda *own: evidence.jobs)
    found, evidence = certificate(tmp_path / "work", (1e11, 1e11, 2e10, 1e11), [("d", "locks")])
    assert bad(found) == "cd"
    # It was measured again, alone.
    assert [len(own.gemm) for own in evidence.speeds] == [5, 5, 20, 5]


def test_a_flipped_bit_in_one_rank_is_named(monkeypatch):
    product = np.matmul

    def flipped(*operands, **options):
        found = product(*operands, **options)
        if rank_here() == 2 and found.dtype == np.float32:
            found.reshape(-1).view(np.uint32)[:1] ^= 1 << 12
        return found

    assert len(set(run_ranks(4, step_digests)[0])) == 1
    monkeypatch.setattr(np, "matmul", flipped)
    found = run_ranks(4, step_digests)[0]
    assert [found.count(own) for own in found] == [3, 3, 1, 3]


@pytest.mark.parametrize(
    "slow, guilty, others", [({(1, 2)}, "", 1), ({(0, 3), (1, 3), (2, 3)}, "d", 0)]
)
def test_a_slow_pair_and_a_slow_node_are_told_apart(monkeypatch, slow, guilty, others):
    receive = ThreadTransport.recv

    def late(self, array, source, tag=0):
        if tuple(sorted((self.rank, source))) in slow:
            time.sleep(0.02)
        receive(self, array, source, tag)

    monkeypatch.setattr(ThreadTransport, "recv", late)
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    monkeypatch.setattr(measuring, "ALONE", 0.02)
    monkeypatch.setattr(collecting, "LONG", 1 << 16)
    pairs = run_ranks(4, links, hosts=HOSTS)[0]
    fact = Facts("", "", [0], 1, "", "", 1, 1 << 30, 1 << 33)
    facts = [fact._replace(host=node, machine=node) for node in HOSTS]
    evidence = collecting.Evidence(facts, pairs=pairs)
    found = judge(evidence, Limits())
    assert (bad(found), len(found.others)) == (guilty, others)


def test_a_clock_that_is_off_is_named(monkeypatch):
    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time():
            return time.time() + 5.0 * (rank_here() == 1)

    monkeypatch.setattr(probes, "time", Clock)
    seen = run_ranks(4, lambda own: PROBES["clocks"].look(own, None), hosts=HOSTS)
    (problem,) = PROBES["clocks"].problems(Values(HOSTS, seen))
    assert problem.host == "b" and "5.0 s ahead" in problem.text


def test_ranks_measure_in_turns():
    working, most = [], []

    def sample():
        working.append(1)
        most.append(len(working))
        time.sleep(0.002)
        working.pop()
        return 1.0, 2.0

    found = run_ranks(4, measure, [[0], [1], [2], [3]], 3, sample)[0]
    assert found == [Speeds([1.0] * 3, [2.0] * 3)] * 4 and max(most) == 1


def test_a_sample_counts_work_per_second():
    now = iter(range(1000))
    gemm, memory = sampler(2.0, lambda: next(now))()
    assert gemm > 0 and memory > 0


def test_a_failed_run_is_reported_once_and_leaves_no_files(tmp_path, monkeypatch):
    ran = []

    def failing(transport, configured, *rest, **more):
        ran.append(transport.rank)
        raise ConfigError("no room").on_every_rank()

    monkeypatch.setattr(collecting, "train", failing)
    assert run_ranks(2, repeat, tmp_path / "work") == [Jobs("", "", "", ["no room"])] * 2
    assert sorted(ran) == [0, 1] and not [*tmp_path.iterdir()]


def test_a_missing_folder_is_refused_on_every_rank(tmp_path):
    with pytest.raises(ConfigError):
        run_ranks(2, repeat, tmp_path / "missing" / "work")
