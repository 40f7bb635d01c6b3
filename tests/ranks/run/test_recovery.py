"""A run that goes on after the loss of ranks: from which state, on which ranks, and which runs cannot."""

import gc
import shutil
import threading
import weakref
from types import SimpleNamespace

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError, PeerLost
from mpitrain.run import injection, loop
from mpitrain.run.loop import train
from mpitrain.run.recovery import Recovery, check
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import Gone, run_ranks
from tests.processes import SECONDS
from tests.runs import go, records


@pytest.fixture
def settings(book, monkeypatch):
    def die(transport, rank):
        raise Gone

    monkeypatch.setitem(injection.FAILURES, "kill", die)
    return [
        *book,
        "run.on_failure=continue",
        "run.steps=9",
        "precision.compute=float64",
        "checkpoint.keep=20",
    ]


def survive(ranks, settings):
    config = parse(with_settings({}, settings))
    return run_ranks(ranks, lambda own: train(own, lambda: config).folder, outlives=True)


def losses(path):
    return {r["step"]: r["loss"] for r in records(path) if "event" not in r and "loss" in r}


def restarts(path):
    return [
        [r.get(key) for key in ("ranks", "step", "lost", "filled_from")]
        for r in records(path)
        if r.get("event") in ("start", "resume")
    ]


def of_fresh_run(tmp_path, settings, step, ranks):
    """The losses of so many ranks that resume a copy of the run from its checkpoint of this step."""
    shutil.copytree(tmp_path / "run", tmp_path / "copy/run")
    for saved in (tmp_path / "copy/run/checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    out = f"run.out={tmp_path / 'copy/run'}"
    go(ranks, [*settings, out, "run.on_failure=end", "run.inject="], "yes")
    return losses(tmp_path / "copy")


@pytest.mark.parametrize(
    "inject, step", [("kill:0@5", 4), ("kill:2@5:backward", 4), ("kill:1@6:evaluation", 6)]
)
def test_the_living_ranks_go_on_from_their_own_state(inject, step, settings, tmp_path):
    settings = [*settings, f"run.inject={inject}", "checkpoint.every=1", "run.eval_every=3"]
    survive(3, settings)
    assert restarts(tmp_path) == [[3, 0, None, None], [2, step, 1, "ranks"]]
    assert records(tmp_path)[-1]["replicas_equal"]
    assert [r["step"] for r in records(tmp_path) if "val_loss" in r] == [3, 6, 9]
    fresh, own = of_fresh_run(tmp_path, settings, step, 2), losses(tmp_path)
    assert [*own] == [*range(1, 10)]
    assert max(abs(fresh[n] - own[n]) for n in own) <= 1e-9


@pytest.mark.parametrize(
    "more, begun",
    [
        (["replication.zero=3", "checkpoint.every=3"], [3, "checkpoint"]),
        (["replication.zero=1", "checkpoint.every=0"], [0, "nothing"]),
        (["replication.mode=master", "checkpoint.every=4"], [4, "checkpoint"]),
    ],
)
def test_state_that_no_rank_has_whole_comes_from_the_newest_checkpoint(
    more, begun, settings, tmp_path
):
    settings = [*settings, *more, "run.inject=kill:1@6"]
    survive(3, settings)
    step, source = begun
    assert restarts(tmp_path)[-1] == [2, step, 1, source]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    if step:
        fresh, own = of_fresh_run(tmp_path, settings, step, 2), losses(tmp_path)
        assert max(abs(fresh[n] - own[n]) for n in own) <= 1e-9


def test_a_rank_may_die_while_the_others_recover(settings, tmp_path, monkeypatch):
    filled, deaths = Recovery._filled, [0]

    def dies(own, job):
        if own._filling and own._root.rank == 0 and deaths:
            deaths.clear()
            raise Gone
        return filled(own, job)

    monkeypatch.setattr(Recovery, "_filled", dies)
    survive(4, [*settings, "run.inject=kill:3@5", "checkpoint.every=0", "run.eval_every=2"])
    assert restarts(tmp_path) == [[4, 0, None, None], [2, 4, 1, "ranks"]]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    # The run before counts, although it has no checkpoint.
    assert [r["step"] for r in records(tmp_path) if "val_loss" in r] == [2, 4, 6, 8, 9]
    times = [r["wall_s"] for r in records(tmp_path) if r.get("event") != "start"]
    assert times == sorted(times)


def test_survivors_one_step_apart_take_the_later_state(settings, tmp_path, monkeypatch):
    step, index = loop._step, 3

    def last(run, number):
        outcome = step(run, number)
        if number == index and run.transport.size == 3 and run.transport.rank < 2:
            if run.transport.rank == 1:
                raise Gone
            raise PeerLost("This rank has not heard that the step has ended.")
        return outcome

    monkeypatch.setattr(loop, "_step", last)
    survive(3, settings)
    assert restarts(tmp_path)[-1] == [2, index + 1, 1, "ranks"]
    assert records(tmp_path)[-1]["replicas_equal"]
    (resumed,) = [r for r in records(tmp_path) if r.get("event") == "resume"]
    assert {*losses(tmp_path)} == {*range(1, 10)} - {index + 1} and resumed["loss"] > 0


def test_nothing_of_the_old_trainer_lives_on(settings, monkeypatch):
    trainers, alive = [], []
    init, steps = Trainer.__init__, loop._loop

    def made(own, *arguments):
        init(own, *arguments)
        trainers.append(weakref.ref(own))

    def begun(run):
        run.transport.barrier()
        if run.transport.size == 2:
            gc.collect()
            alive.extend(one() for one in trainers[:3])
        return steps(run)

    monkeypatch.setattr(Trainer, "__init__", made)
    monkeypatch.setattr(loop, "_loop", begun)
    survive(3, [*settings, "run.inject=kill:1@5"])
    assert len(trainers) == 5 and alive == [None] * 6


REFUSED = {
    "layout.dp=3": "layout.dp is 3",
    "layout.tp=3": "tp x pp x cp is 3 x 1 x 1",
    "replication.mode=local": "replication.mode is local",
    "replication.algorithm=shared": "replication.algorithm is shared",
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_run_that_cannot_lose_a_rank_is_refused(key, settings, tmp_path):
    with pytest.raises(ConfigError) as refused:
        survive(3, [*settings, key])
    assert REFUSED[key] in str(refused.value) and refused.value.agreed
    assert not (tmp_path / "run").exists()


def test_ranks_that_need_each_other_are_refused_with_the_reason(settings):
    config = parse(with_settings({}, settings))
    ranks = SimpleNamespace(needs_all="MPI X cannot lose a rank; Take MPI Y", size=3)
    with pytest.raises(
        ConfigError, match=r"but MPI X cannot lose a rank\.\n             Take MPI Y\."
    ):
        check(config, ranks)
    ranks.needs_all, ranks.size = "", 1
    with pytest.raises(ConfigError, match="there is one rank"):
        check(config, ranks)


def test_a_recovery_that_takes_too_long_ends_the_job(settings):
    said, ended = [], threading.Event()
    ranks = SimpleNamespace(needs_all="", size=3, abandon=lambda: ended.wait(SECONDS))
    waiting = Recovery(parse(with_settings({}, [*settings, "run.recover_seconds=1"])), ranks)
    ranks.abort = lambda text: (said.append(text), ended.set())
    ranks.survivors = lambda: setattr(ranks, "size", 2)
    ranks.gather_text, ranks.rank = lambda value: [value] * 2, 1
    waiting.go_on("a loss")
    assert "run.recover_seconds 1: it was connecting the living ranks." in said[0]
