"""The cost model, the choice it leads to, and fitting it: no ranks, no clock."""

import math

import pytest

from mpitrain.bench.fit import check, fit
from mpitrain.bench.sweep import Row, sizes
from mpitrain.collectives.choose import candidates, choose
from mpitrain.collectives.cost import DEFAULT, REGIMES, WHOLE, Tuning, predict, work
from mpitrain.collectives.tuning import read_tuning, write_tuning
from mpitrain.errors import ConfigError

ONE_HOST = ("a",) * 4
FOUR_HOSTS = ("a", "b", "c", "d")


def row(algorithm, nbytes, microseconds, buffers="window"):
    return Row("allreduce", algorithm, buffers, nbytes, nbytes // 4, "float32", 4, microseconds, 0, 0, 0, 0, 0, 0, algorithm)


@pytest.mark.parametrize("n", range(1, 10))
def test_the_busiest_rank_moves_what_the_formulas_say(n):
    count, width = 2520 * 8, 4
    nbytes, hosts = count * width, ("a",) * n
    lg = math.ceil(math.log2(n))
    ring = work("allreduce", "ring", hosts, count, width)  # in one segment
    assert (ring.host_messages, ring.host_bytes) == (2 * (n - 1), 2 * nbytes * (n - 1) // n)
    assert ring.reduced_bytes == nbytes * (n - 1) // n
    assert ring.net_messages == ring.net_bytes == 0
    assert work("allreduce", "star", hosts, count, width).host_bytes == 2 * (n - 1) * nbytes  # in, then out
    assert work("broadcast", "binomial", hosts, count, width).host_bytes == lg * nbytes
    assert work("all-to-all", "pairwise", hosts, count, width).host_bytes == nbytes * (n - 1) // n


def test_messages_between_hosts_are_counted_apart():
    apart = work("allreduce", "ring", FOUR_HOSTS, 4000, 4)
    assert (apart.host_messages, apart.net_messages, apart.net_bytes) == (0, 6, 24000)
    two_levels = work("allreduce", "hierarchical", ("a", "a", "b", "b"), 4000, 4)
    assert two_levels.net_bytes == 16000  # two columns of half the array, each sent twice by halves
    assert work("allreduce", "ring", ("a", "a", "b", "b"), 4000, 4).net_bytes == 24000  # one rank of two sends on
    assert work("allreduce", "halving-doubling", ("a", "a", "b", "b"), 4000, 4).net_bytes == 32000
    assert two_levels.host_bytes == 16000


def test_planted_constants_are_found_again():
    regimes = {regime: (1e-6 * (1 + i), 1e-10 * (2 + i), *DEFAULT.plans[2][regime][2:4], 3e-10 / (1 + i))
               for i, regime in enumerate(REGIMES)}
    whole = {name: dict.fromkeys(REGIMES, (2e-6, 1e-10 * (1 + i))) for i, name in enumerate(WHOLE)}
    planted = Tuning({"hosts": 1}, {4: regimes}, {4: whole})
    rows = [row(name, nbytes, 1e6 * predict(planted, "allreduce", name, ONE_HOST, nbytes // 4, 4))
            for nbytes in sizes(1 << 10, 1 << 26, 4) for name in (*candidates(ONE_HOST, True), "star")]
    rows += [row("shared", r.bytes, 1e6 * predict(planted, "allreduce", "shared-copied", ONE_HOST, r.count, 4), "plain")
             for r in rows if r.algorithm == "shared"]
    found = fit({"hosts": 1}, ONE_HOST, rows)
    for regime in REGIMES:
        assert found.plans[4][regime] == pytest.approx(regimes[regime], rel=1e-6)
        for name in WHOLE:
            assert found.whole[4][name][regime] == pytest.approx(whole[name][regime], rel=1e-6)
    checked = check(found, ONE_HOST, rows)
    assert checked.error < 1e-6
    assert all(ratio < 1 + 1e-6 for _, ratio in checked.choices.values())


def test_a_fit_never_goes_below_zero():
    rows = [row(name, nbytes, 50.0) for nbytes in sizes(1 << 10, 1 << 26, 4) for name in candidates(ONE_HOST, True)]
    found = fit({"hosts": 1}, ONE_HOST, rows)
    assert all(constant >= 0 for constants in found.plans[4].values() for constant in constants)


def test_the_choice_follows_hosts_and_sizes():
    assert choose(DEFAULT, ONE_HOST, 1 << 20, 4) == "shared"
    assert choose(DEFAULT, ("a", "a", "b", "b"), 1 << 24, 4) == "hierarchical"
    assert choose(DEFAULT, FOUR_HOSTS, 4, 4, is_native=False) == "recursive-doubling"
    assert choose(DEFAULT, FOUR_HOSTS, 1 << 24, 2, is_native=False) in ("ring", "halving-doubling")
    assert choose(DEFAULT, ("a",), 100, 4) in candidates(("a",), True)


def test_a_tuning_file_comes_back_as_it_went(tmp_path):
    write_tuning(tmp_path / "tuning.json", DEFAULT)
    assert read_tuning(tmp_path / "tuning.json") == DEFAULT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}, "plans": {"2": {"1": [1]}}, "whole": {"2": {}}}'])
def test_another_file_is_no_tuning_file(tmp_path, text):
    (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(ConfigError, match="bench fit"):
        read_tuning(tmp_path / "tuning.json")


def test_a_missing_tuning_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json cannot be read"):
        read_tuning(tmp_path / "nothing.json")
