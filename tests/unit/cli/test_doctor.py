"""What `doctor` concludes from what the ranks see."""

import sys

import pytest

from mpitrain.cli.terminal import progress
from mpitrain.config import parse
from mpitrain.machine.process import Launched, Processor, processor
from mpitrain.ops.host import product
from mpitrain.tools.bench.kernels import host_products
from mpitrain.tools.bench.kernels.host_products import described
from mpitrain.tools.bench.kernels.host_products import rates as measured_rates
from mpitrain.tools.doctor import facts as doctor
from mpitrain.tools.doctor.facts import Facts, share_of_cores, verdict

FINE = Facts("a", "m", [0, 1], 2, "CPU", "openblas 1 Zen", 1, 1 << 30, 8 << 30, ["cpu", "cuda-sim"])


def said(*everyone, size=0):
    return list(verdict(list(everyone), Launched("Open MPI", 0, 1, 0, size or len(everyone))))


def test_a_sound_machine_is_one_line():
    assert said(FINE, FINE) == [
        "verdict      2 rank(s) can train with --device cpu or cuda-sim; no problem was found."
    ]


def test_only_what_every_rank_can_do_works():
    assert "with --device" in said(FINE, FINE._replace(host="b", kinds=["cpu", "cuda"]))[0]


@pytest.mark.parametrize(
    "changes, ranks, wrong, way_out",
    [
        ({}, 3, "a has 2 cores for 3 ranks: they take turns", "Start at most 2 ranks there."),
        ({"cores": [0]}, 2, "a has 2 cores, but 2 ranks may run on 1 of them", "without taskset"),
        ({"threads": 2}, 2, "2 ranks on a use 2 BLAS threads each, more", "Unset OMP_NUM_THREADS"),
        ({"shared": 1 << 20}, 2, "/dev/shm of a has 1 MB free", "start it with --shm-size=1g."),
        ({"shared": 64 << 20}, 2, "/dev/shm of a has 67 MB free", "start it with --shm-size=1g."),
    ],
)
def test_what_will_go_wrong_comes_with_its_way_out(changes, ranks, wrong, way_out):
    first, warning = said(*[FINE._replace(**changes)] * ranks)
    assert first.endswith("; 1 thing(s) will go wrong:")
    assert warning.startswith(f"warning: {wrong}") and way_out in warning


def test_ranks_that_are_bound_to_one_core_are_named_beside_others_with_room():
    ranks = [FINE._replace(cores=cores, processors=4) for cores in ([0], [0], [1], [1, 2, 3])]
    (warning,) = [line for line in said(*ranks) if "warning" in line]
    assert "a has 4 cores, but 2 ranks may run on 1 of them" in warning


def test_each_host_is_judged_by_its_own_size():
    other = FINE._replace(host="b", cores=[0], processors=1)
    assert [line for line in said(FINE, FINE, other, other) if "warning" in line] == [
        "warning: b has 1 cores for 2 ranks: they take turns, and timings mean little. Start at most 1 ranks there."
    ]


def test_a_start_in_which_everybody_is_alone_does_not_work():
    first, warning = said(FINE, size=2)
    assert first == "verdict      this start does not work:"
    assert "`mpitrain launch` finds it" in warning


@pytest.mark.parametrize(
    "sets, words",
    [
        ([[0, 1], [0, 1]], "2 core(s) that they share"),
        ([[0], [1]], "1 core(s) of its own each"),
        ([[0, 1], [2]], "1, 2 core(s) of its own each"),
        ([[0, 1], [1, 2]], "3 core(s) that they share"),
    ],
)
def test_shared_cores_are_not_counted_twice(sets, words):
    assert share_of_cores(sets) == words


@pytest.mark.parametrize("is_there", (True, False))
def test_mkl_is_here_where_its_library_loads_whatever_modules_there_are(is_there, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if is_there else object())
    monkeypatch.setattr(product, "installed_mkl", lambda: {"float32": print} if is_there else {})
    assert ("mkl" in doctor.extras()) == is_there


@pytest.mark.parametrize(
    ("rates", "is_by_mkl", "gains", "fragments"),
    [
        ({"NumPy": 5e10}, False, False, ["by NumPy's BLAS, 50 GFLOP/s"]),
        ({"NumPy": 5e10}, False, True, ["50 GFLOP/s", "pip install 'mpitrain[mkl]'"]),
        ({"NumPy": 5e10, "MKL": 6e10}, True, True, ["by MKL, 60", "BLAS 50", "MKL is 1.20 times"]),
        ({"NumPy": 5e10, "MKL": 4e10}, False, True, ["by NumPy's BLAS, 50", "MKL is 0.80 times"]),
    ],
)
def test_it_is_said_what_multiplies_and_how_fast_the_other_is(rates, is_by_mkl, gains, fragments):
    text = described(rates, is_by_mkl, gains)
    assert all(fragment in text for fragment in fragments)
    assert ("pip" in text) == any("pip" in fragment for fragment in fragments)


def test_both_libraries_are_measured_where_mkl_is_installed(monkeypatch):
    assert [*measured_rates()] == ["NumPy", *(["MKL"] if product.installed_mkl() else [])]
    monkeypatch.setattr(host_products, "installed_mkl", lambda: {"float32": print})
    found = measured_rates()
    assert [*found] == ["NumPy", "MKL"] and all(rate > 0 for rate in found.values())


def test_a_run_recommends_mkl_once_and_only_where_it_gains(monkeypatch, tmp_path):
    config = parse({"device": {"kind": "cpu"}})
    monkeypatch.setattr(progress, "installed_mkl", dict)
    for vendor, features, gains in [
        ("GenuineIntel", "fpu avx512f", True),
        ("GenuineIntel", "fpu avx2", False),
        ("AuthenticAMD", "fpu avx512f", False),
    ]:
        path = tmp_path / vendor
        first = f"model name\t: A\nvendor_id\t: {vendor}\nflags\t\t: {features}\n"
        path.write_text(f"{first}\nmodel name\t: B\n")
        found = processor(str(path))
        assert (found.name, found.gains_from_mkl) == ("A", gains)
        monkeypatch.setattr(progress, "processor", lambda found=found: found)
        assert ("mpitrain[mkl]" in progress.slow_products(config)) == gains
    fast = Processor("A", "GenuineIntel", frozenset(["avx512f"]))
    monkeypatch.setattr(progress, "processor", lambda: fast)
    assert progress.slow_products(config)
    assert not progress.slow_products(parse({"device": {"kind": "cuda-sim"}}))
    monkeypatch.setattr(progress, "installed_mkl", lambda: {"float32": print})
    assert not progress.slow_products(config)


def test_without_a_gpu_nothing_sounds_like_a_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.gpus() == "none (there is no nvidia-smi); everything else works without"
