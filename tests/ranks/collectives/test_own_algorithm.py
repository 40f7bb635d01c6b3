"""All-reduces that a user writes as a file: proven before a message moves."""

import json
import re
from functools import cache
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest

import mpitrain
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans import exchanges, ring
from mpitrain.collectives.plans.steps import SEGMENT
from mpitrain.collectives.selection import own_algorithm
from mpitrain.collectives.selection.algorithm import is_file
from mpitrain.collectives.selection.own_algorithm import answer, file_algorithm, proven
from mpitrain.collectives.selection.table import TABLES
from mpitrain.config import with_settings
from mpitrain.errors import ConfigError
from mpitrain.run.choices import parse
from mpitrain.run.loop import train
from mpitrain.run.run_dir import check_algorithms_named, configuration
from mpitrain.tables import Table
from mpitrain.transport.threads import run_ranks
from tests.runs import TINY

pytestmark = pytest.mark.slow

PAGE = Path(mpitrain.__file__).parent / "tools/plan/README.md"
STAR = re.search(r"```python\n(def all_reduce.*?)```", PAGE.read_text(), re.DOTALL)[1]
RING = """
def all_reduce(rank, ranks, count):
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    chunk = [(c * count // ranks, (c + 1) * count // ranks) for c in range(ranks)]
    return [
        ([(after, *chunk[(first - step) % ranks])], [(before, *chunk[(first - step - 1) % ranks])], adds)
        for first, adds in ((rank - 1, True), (rank, False))
        for step in range(ranks - 1)
    ]
"""
BODY = "def all_reduce(rank, ranks, count):\n    "
NAMED = """from __future__ import annotations
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple
class Peer(IntEnum):
    ROOT = 0
class Transfer(NamedTuple):
    peer: int
    start: int
    stop: int
@dataclass
class Star:
    others: list[int]
    def root(self, count):
        every = [Transfer(r, 0, count) for r in self.others]
        return [([], every, True), (every, [], False)]
def all_reduce(rank, ranks, count):
    root = Transfer(Peer.ROOT, 0, count)
    return [([root], [], False), ([], [root], False)] if rank else Star([*range(1, ranks)]).root(count)
"""
AFTER = "(rank + 1) % ranks, 0, count"
BEFORE = "(rank - 1) % ranks, 0, count"


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_star_of_the_page_sums(ranks, count, tmp_path):
    (tmp_path / "star.py").write_text(STAR)
    name = file_algorithm(str(tmp_path / "star.py"))

    def summed(transport):
        array = np.arange(count) * (transport.rank + 1.0)
        Group(transport, name).all_reduce(array)
        return array

    for array in run_ranks(ranks, summed):
        assert np.array_equal(array, np.arange(count) * ranks * (ranks + 1) / 2)


def test_the_ring_of_a_file_is_our_ring():
    for ranks in (1, 2, 3, 8):
        plans = answer("ring.py", RING.encode(), ranks, 40)
        assert plans == [ring.all_reduce(rank, ranks, 40) for rank in range(ranks)]


def test_named_tuples_enumerations_and_dataclasses_are_steps_too():
    assert answer("star.py", NAMED.encode(), 3, 5) == [
        exchanges.star_all_reduce(r, 3, 5) for r in range(3)
    ]


@pytest.mark.parametrize("count", [25, 5 * SEGMENT])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
def test_our_own_plans_pass_the_simulation(n, count, monkeypatch):
    monkeypatch.setattr(Table, "is_added", lambda table, name: True)
    hosts = (["a", "b"][: max(1, n // 2)] * n)[:n]
    for operation, table in TABLES.items():
        for name, row in table.items():
            if row.plans and not is_file(name):
                assert own_algorithm._proven.__wrapped__(row, operation, name, hosts, count)


@pytest.mark.parametrize(
    "code, said",
    [
        (f"return [([({AFTER})], [({BEFORE})], True)]", "0 times"),
        (f"return [([({AFTER})], [({BEFORE})], True)] * 3", "of rank 0 2 times"),
        (f"return [([({AFTER})], [], True), ([], [({BEFORE})], True)]", "no message can"),
        (f"return [([({AFTER})], [((rank - 1) % ranks, 1, count)], True)]", "receives 4"),
        (
            "return [([(p, 0, count) for p in range(ranks) if p != rank],"
            " [(p, 0, count) for p in range(ranks) if p != rank], True)]",
            "another order",
        ),
        ("return [([(rank, 0, count)], [], True)]", "peer 0"),
        ("return [([(1, 0, count + 1)], [], True)]", "elements 0 to"),
        (f"return [([({AFTER})], [({BEFORE})], False)]", "replaces it"),
        ("return 7", "list of steps"),
        ("return [(1, 2)]", "(sends, receives, adds)"),
        ("raise ValueError('planned')", "ValueError in line 2: planned"),
        ("raise SystemExit", "raises SystemExit"),
        ("while True: yield [], [], True", "more than 100,000"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(code, said, tmp_path):
    (tmp_path / "own.py").write_text(BODY + code)
    with pytest.raises(ConfigError) as caught:
        proven("allreduce", file_algorithm(str(tmp_path / "own.py")), "aaa", 5)
    assert said in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("code", ["", "def all_reduce(", "all_reduce = 3"])
def test_a_file_without_the_function_is_refused(code):
    with pytest.raises(ConfigError):
        answer("own.py", code.encode(), 2, 1)


def test_ranks_with_different_answers_of_a_file_are_refused(tmp_path, monkeypatch):
    of_thread = cache(lambda thread, *given: answer.__wrapped__(*given))
    uncached = own_algorithm._proven.__wrapped__
    monkeypatch.setattr(own_algorithm, "answer", lambda *given: of_thread(get_ident(), *given))
    monkeypatch.setattr(own_algorithm, "_proven", uncached)
    (tmp_path / "own.py").write_text(
        "import os\n"
        f"root = 0\ntry:\n    os.mkdir({str(tmp_path / 'first')!r})\n"
        "except FileExistsError:\n    root = 1\n"
        + BODY
        + "others = [r for r in range(ranks) if r != root]\n"
        "    if rank != root:\n"
        "        return [([(root, 0, count)], [], False), ([], [(root, 0, count)], False)]\n"
        "    return [([], [(r, 0, count) for r in others], True),"
        " ([(r, 0, count) for r in others], [], False)]\n"
    )
    name = file_algorithm(str(tmp_path / "own.py"))

    def summed(transport):
        with pytest.raises(ConfigError, match="need one answer of"):
            Group(transport, name).all_reduce(np.ones(5))

    run_ranks(2, summed)


def trained(ranks, resume="no", **more):
    """The losses so far of a run under `own`, trained on ranks that are threads."""
    settings = [*TINY, "run.out=own", *(f"{key.replace('__', '.')}={more[key]}" for key in more)]
    config = parse(with_settings({}, settings))
    run_ranks(ranks, lambda own: train(own, lambda: config, resume, lambda: False))
    lines = Path("own/metrics.jsonl").read_text().splitlines()
    return [found["loss"] for found in map(json.loads, lines) if "loss" in found]


def test_a_file_trains_and_its_run_names_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(RING)
    losses = trained(3, replication__algorithm="own.py")
    written = configuration(Path("own"))
    with pytest.raises(ConfigError):
        check_algorithms_named(written, ["run.steps=8"], Path("own"))
    more = trained(2, "yes", run__steps=8, replication__algorithm="own.py")
    assert more[:6] == losses and len(more) == 8
    trained(2, "yes", run__steps=9)
    begun = json.loads(
        re.search(r'.*"step": 8.*changed.*', Path("own/metrics.jsonl").read_text())[0]
    )
    before, after = begun["changed"]["replication.algorithm"]
    assert before.startswith("own.py sha256:") and after == "auto"
    Path("own.py").write_text(RING + "\n")
    with pytest.raises(ConfigError):
        parse({"replication": {"algorithm": written.replication.algorithm}})
    Path("own").rename("one")
    assert trained(3, replication__algorithm="ring") == losses
