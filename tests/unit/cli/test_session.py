"""Ranks under a launcher that sets no variable of the local rank."""

import os
import sys
from types import SimpleNamespace

import pytest
from threadpoolctl import threadpool_info

from mpitrain.cli import session
from mpitrain.machine import process


@pytest.mark.parametrize("known", ("none", "Open MPI"))
def test_local_ranks_are_counted_by_host_under_an_unknown_launcher(known, monkeypatch):
    chosen = []
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(process, "launched", lambda: process.Launched(known, 0, 1, 0, 1))
    monkeypatch.setattr(process, "choose_gpu", lambda kind, local: chosen.append((kind, local)))
    monkeypatch.setattr(process, "lower_blas_threads", lambda ranks: chosen.append(ranks))
    ranks = SimpleNamespace(rank=3, size=5, hosts=["a", "b", "a", "a", "b"])
    session._count_local_ranks(ranks, lambda: "cuda")
    assert chosen == ([("cuda", 2), 3] if known == "none" else [])
    is_silent = os.fstat(sys.stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    assert is_silent == (known == "none")


def test_blas_threads_are_divided_after_the_ranks_are_counted(monkeypatch):
    if not any(one["user_api"] == "blas" for one in threadpool_info()):
        pytest.skip("this NumPy has no BLAS that threadpoolctl knows")
    from threadpoolctl import threadpool_limits

    with threadpool_limits(4):
        monkeypatch.setattr(process, "processors", lambda: 8)
        monkeypatch.setattr(process, "cores", lambda: 8)
        monkeypatch.setattr(process, "blas_threads", lambda: 8)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        process.lower_blas_threads(8)
        assert {one["num_threads"] for one in threadpool_info()} == {1}
