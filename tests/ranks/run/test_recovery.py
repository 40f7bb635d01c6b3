"""A run that goes on after the loss of ranks: from which state, on which ranks, and which runs cannot."""

import gc
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from mpitrain.cli.launch.restarts import Restarts
from mpitrain.cli.launch.supervise import LauncherOutput
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError, PeerLost, TrainingError
from mpitrain.layers.flat import FlatLayout, Storage
from mpitrain.run import injection, recovery
from mpitrain.run.loop import Run, train
from mpitrain.run.recovery import Recovery, check
from mpitrain.run.trainer import Trainer
from mpitrain.transport.base import Traffic
from mpitrain.transport.threads import Gone, ThreadTransport, World, run_ranks
from mpitrain.transport.windows import Windows
from tests.processes import SECONDS
from tests.runs import go, records

F32 = "precision.compute=float32"
FROZEN = ["model.freeze=embedding.*"]
EXPERTS = ["layout.ep=2", "model.experts=4"]
COPIES = ["run.copies_every=2", "checkpoint.every=4"]


@pytest.fixture
def settings(book, monkeypatch):
    def die(transport, rank):
        wait_for_others(transport, 1)
        raise Gone

    monkeypatch.setitem(injection.FAILURES, "kill", die)
    return [
        *book,
        "run.on_failure=continue",
        "run.steps=9",
        "precision.compute=float64",
        "checkpoint.keep=20",
    ]


def survive(ranks, settings, hosts=None, spares=0):
    config = parse(with_settings({}, settings))
    return run_ranks(
        ranks + spares,
        lambda own: train(own, lambda: config).folder,
        hosts=hosts,
        outlives=True,
        spares=spares,
    )


def wait_for_others(transport, dying):
    """Wait until all living ranks but the `dying` wait for messages: none of them is still within the step before."""
    world, until = transport.world, time.monotonic() + SECONDS
    while time.monotonic() < until:
        with world.lock:
            waiting = {wait.rank for wait in world.waits.values() if not wait.ready()}
            if len(waiting) == len({*world.numbers.values()} - world.lost) - dying:
                return
        time.sleep(0.001)
    raise AssertionError("The other ranks do not wait for the one that dies.")


def kill_together(monkeypatch, ranks, size):
    """Let these ranks of `size` die in step 6, none before all are there."""
    step, there = Run.step, threading.Barrier(len(ranks), timeout=60)

    def dies(run):
        if (run.transport.size, run.finished) == (size, 5) and run.transport.number in ranks:
            if there.wait() == 0:
                wait_for_others(run.transport, len(ranks))
            there.wait()
            raise Gone
        return step(run)

    monkeypatch.setattr(Run, "step", dies)


def noted_draws(monkeypatch):
    """Return a list that gets the names of the trained tensors in each drawing of initial values."""
    drawn, initialize = [], FlatLayout.initialize

    def noted(layout, flat, seed, backend, pieces, is_drawn):
        if isinstance(layout, Storage):
            drawn.append([entry.name for entry in layout.entries if is_drawn(entry.name)])
        initialize(layout, flat, seed, backend, pieces, is_drawn)

    monkeypatch.setattr(FlatLayout, "initialize", noted)
    return drawn


def losses(path):
    """Of steps by number; a rank that should have logged one may be lost before, and its successor notes the loss."""
    logged = [r for r in records(path) if r.get("event", "resume") == "resume"]
    return {r["step"]: r["loss"] for r in logged if r.get("loss") is not None}


def restarts(path):
    return [
        [r.get(key) for key in ("ranks", "step", "lost", "filled_from", "left")]
        for r in records(path)
        if r.get("event") in ("start", "resume")
    ]


def equal_a_fresh_run(tmp_path, settings, step, ranks):
    """Whether the run's losses are those of so many ranks that resume a copy from its checkpoint of this step."""
    shutil.copytree(tmp_path / "run", tmp_path / "copy/run")
    for saved in (tmp_path / "copy/run/checkpoints").iterdir():
        if int(saved.name.removeprefix("step-")) > step:
            shutil.rmtree(saved)
    out = f"run.out={tmp_path / 'copy/run'}"
    go(ranks, [*settings, out, "run.on_failure=end", "run.inject="], "yes")
    fresh, own = losses(tmp_path / "copy"), losses(tmp_path)
    nearest = 1e-5 if F32 in settings else 1e-9
    return all(abs(fresh[number] - own[number]) <= nearest for number in range(1, 10))


@pytest.mark.parametrize(
    "inject, step", [("kill:0@5", 4), ("kill:2@5:backward", 4), ("kill:1@6:evaluation", 6)]
)
def test_the_living_ranks_go_on_from_their_own_state(inject, step, settings, tmp_path):
    settings = [*settings, f"run.inject={inject}", "checkpoint.every=1", "run.eval_every=3"]
    survive(3, settings)
    assert restarts(tmp_path) == [[3, 0, None, None, None], [2, step, 1, "ranks", None]]
    assert records(tmp_path)[-1]["replicas_equal"]
    assert [r["step"] for r in records(tmp_path) if "val_loss" in r] == [3, 6, 9]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    assert equal_a_fresh_run(tmp_path, settings, step, 2)


@pytest.mark.parametrize(
    "more, begun",
    [
        (["replication.zero=3", "checkpoint.every=3"], [3, "checkpoint"]),
        (["replication.zero=1", "checkpoint.every=0"], [0, "nothing"]),
        (["replication.mode=master", "checkpoint.every=4"], [4, "checkpoint"]),
        (["replication.zero=2", *COPIES], [4, "copies"]),
        (["replication.zero=1", "replication.wire=topk", F32, *COPIES], [4, "copies"]),
        (["replication.zero=1", "optimizer.name=adamw8bit", *COPIES], [4, "copies"]),
        (["replication.mode=master", "run.inject=kill:0@6", *COPIES], [4, "copies"]),
        (["replication.mode=server", "run.inject=kill:2@6", *COPIES], [4, "copies"]),
    ],
)
def test_state_that_no_rank_has_whole_comes_from_copies_or_the_newest_checkpoint(
    more, begun, settings, tmp_path
):
    settings = [*settings, "run.inject=kill:1@6", *more]
    survive(3, settings)
    step, source = begun
    assert restarts(tmp_path) == [[3, 0, None, None, None], [2, step, 1, source, None]]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    if step:
        assert equal_a_fresh_run(tmp_path, settings, step, 2)


def test_a_rank_may_die_while_the_others_recover(settings, tmp_path, monkeypatch):
    fill, deaths = recovery.fill, [0]

    def dies(trainer, *arguments):
        if trainer.transport.rank == 0 and deaths:
            deaths.clear()
            raise Gone
        fill(trainer, *arguments)

    monkeypatch.setattr(recovery, "fill", dies)
    survive(4, [*settings, "run.inject=kill:3@5", "checkpoint.every=0", "run.eval_every=2"])
    assert restarts(tmp_path) == [[4, 0, None, None, None], [2, 4, 1, "ranks", None]]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    # The run before counts, although it has no checkpoint.
    assert [r["step"] for r in records(tmp_path) if "val_loss" in r] == [2, 4, 6, 8, 9]
    times = [r["wall_s"] for r in records(tmp_path) if r.get("event") != "start"]
    assert times == sorted(times)


def test_losses_before_the_first_step_keep_the_lines_of_the_starts_before(
    settings, tmp_path, monkeypatch
):
    step = Run.step

    def dies(run):
        if (run.transport.size, run.finished, run.transport.rank) == (3, 0, 0):
            raise Gone
        return step(run)

    monkeypatch.setattr(Run, "step", dies)
    survive(4, [*settings, "run.inject=kill:3@1"])
    assert restarts(tmp_path) == [
        [4, 0, None, None, None],
        [3, 0, 1, "ranks", None],
        [2, 0, 1, "ranks", None],
    ]
    times = [r["wall_s"] for r in records(tmp_path)]
    assert times == sorted(times) and [*losses(tmp_path)] == [*range(1, 10)]


def test_survivors_one_step_apart_take_the_later_state(settings, tmp_path, monkeypatch):
    step, index, ended = Trainer.step, 3, threading.Barrier(3, timeout=SECONDS)

    def last(run, number, *batch):
        outcome = step(run, number, *batch)
        if number == index and run.transport.size == 3:
            ended.wait()
            if run.transport.rank == 1:
                raise Gone
            if run.transport.rank == 0:
                while not run.transport.world.lost:
                    time.sleep(0.001)
                raise PeerLost("This rank has not heard that the step has ended.")
        return outcome

    monkeypatch.setattr(Trainer, "step", last)
    survive(3, settings)
    assert restarts(tmp_path)[-1] == [2, index + 1, 1, "ranks", None]
    assert records(tmp_path)[-1]["replicas_equal"]
    (resumed,) = [r for r in records(tmp_path) if r.get("event") == "resume"]
    assert {*losses(tmp_path)} == {*range(1, 10)} and resumed["loss"] > 0


@pytest.mark.parametrize(
    ("ranks", "killed", "keys", "law"),
    [
        (4, (2, 3), "replication.mode=server replication.servers=2", "servers 2 needs 3 ranks"),
        (
            4,
            (2, 3),
            "replication.zero=1 memory.limit_gb=0.0038 model.width=64",
            "by memory.limit_gb",
        ),
    ],
)
def test_ranks_that_are_too_few_for_the_job_say_so_as_a_loss(
    ranks, killed, keys, law, settings, tmp_path, monkeypatch
):
    """`launch` starts a lost run again; a wrong configuration, exit code 2, it does not."""
    kill_together(monkeypatch, killed, ranks)
    with pytest.raises(PeerLost, match=f"After the loss of 2 rank.s. the other 2 .*{law}") as error:
        survive(ranks, [*settings, *keys.split()], hosts="aabb")
    assert error.value.agreed and error.value.exit_code == 1


def test_copies_that_find_no_memory_name_their_key(settings, monkeypatch):
    def refused(*arguments):
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr(recovery.NeighbourCopies, "take", refused)
    with pytest.raises(TrainingError, match=r"run\.copies_every asks: Unable to allocate") as error:
        survive(2, [*settings, *COPIES])
    assert "run.copies_every=0" in error.value.way_out


def test_a_delay_of_a_lost_rank_is_lost_with_it(settings, tmp_path):
    survive(3, [*settings, "run.delay=2:1,0:1", "run.inject=kill:2@6"])
    assert restarts(tmp_path)[-1][0] == 2
    (text,) = [line for line in (tmp_path / "run/config.toml").open() if line.startswith("delay")]
    assert text == 'delay = "0:1"\n'


@pytest.mark.parametrize(
    "ranks, killed, more, begun",
    [
        (6, 3, ["layout.tp=2"], [4, 5, 1, "ranks", 1]),
        (4, 0, ["layout.pp=2", "batch.micro_batches=2"], [2, 5, 1, "ranks", 1]),
        (4, 2, ["layout.cp=2"], [2, 5, 1, "ranks", 1]),
        (6, 5, ["layout.tp=2", "replication.zero=1", *COPIES], [4, 4, 1, "copies", 1]),
    ],
)
def test_a_damaged_replica_leaves_as_a_whole(ranks, killed, more, begun, settings, tmp_path):
    settings = [
        *settings,
        "model.heads=2",
        "checkpoint.every=1",
        *more,
        f"run.inject=kill:{killed}@6",
    ]
    survive(ranks, settings)
    left, step = begun[0], begun[1]
    assert restarts(tmp_path)[-1] == begun and records(tmp_path)[-1]["replicas_equal"]
    assert [*losses(tmp_path)] == [*range(1, 10)]
    assert equal_a_fresh_run(tmp_path, settings, step, left)


@pytest.mark.parametrize(
    "ranks, spares, killed, more, begun",
    [
        (3, 1, (1,), [], [3, 5, 1, "ranks", None, [[1, 3]]]),
        (3, 2, (0, 2), FROZEN, [3, 5, 2, "ranks", None, [[0, 3], [2, 4]]]),
        (3, 1, (0, 2), [], [2, 5, 2, "ranks", None, [[0, 3]]]),
        (3, 1, (0,), ["replication.zero=1", *COPIES], [3, 4, 1, "copies", None, [[0, 3]]]),
        (3, 1, (2,), ["replication.zero=2", *COPIES], [3, 4, 1, "copies", None, [[2, 3]]]),
        (
            3,
            1,
            (1,),
            ["replication.zero=3", "checkpoint.every=2"],
            [3, 4, 1, "checkpoint", None, [[1, 3]]],
        ),
        (
            3,
            1,
            (1,),
            ["replication.wire=powersgd", F32, *COPIES],
            [3, 4, 1, "copies", None, [[1, 3]]],
        ),
        (3, 1, (2,), ["replication.mode=server", *COPIES], [3, 4, 1, "copies", None, [[2, 3]]]),
        (4, 1, (2,), ["layout.tp=2"], [4, 5, 1, "ranks", None, [[2, 4]]]),
        (
            2,
            1,
            (1,),
            ["layout.pp=2", "batch.micro_batches=2", *COPIES],
            [2, 4, 1, "copies", None, [[1, 2]]],
        ),
        (4, 1, (2,), EXPERTS, [4, 5, 1, "ranks", None, [[2, 4]]]),
        (4, 1, (0, 1), [*EXPERTS, "replication.zero=3", *COPIES], [2, 4, 2, "copies", None, None]),
        (4, 1, (0, 2, 3), ["layout.cp=2"], [2, 5, 3, "ranks", None, [[0, 4]]]),
        (4, 0, (0, 3), ["layout.tp=2"], [2, 5, 2, "ranks", None, [[0, 2]]]),
    ],
)
def test_spares_take_the_places_of_lost_ranks_and_the_losses_stay_bitwise(
    ranks, spares, killed, more, begun, settings, tmp_path, monkeypatch
):
    settings = [*settings, "model.heads=2", *more]
    alone = tmp_path / "alone"
    survive(ranks, [*settings, f"run.out={alone / 'run'}"], spares=spares)
    kill_together(monkeypatch, killed, ranks)
    drawn = noted_draws(monkeypatch)
    survive(ranks, settings, spares=spares)
    assert sum(map(bool, drawn)) == ranks  # Nothing is drawn that the living ranks or a file have.
    (resumed,) = [r for r in records(tmp_path) if r.get("event") == "resume"]
    assert [*restarts(tmp_path)[-1], resumed.get("replaced")] == begun
    same, own = losses(alone), losses(tmp_path)
    last = 10 if begun[0] == ranks else begun[1] + 1  # Fewer ranks sum in another order.
    assert [own[step] for step in range(1, last)] == [same[step] for step in range(1, last)]


def test_without_a_whole_replica_the_run_ends_with_the_reason(settings, tmp_path, monkeypatch):
    kill_together(monkeypatch, (0, 1, 3), 4)
    with pytest.raises(
        PeerLost, match=r"No replica is whole .* tp 2 x pp 1 .* 1 are left"
    ) as error:
        survive(4, [*settings, "layout.tp=2", "model.heads=2"])
    assert error.value.agreed and "--resume=auto" in str(error.value)


@pytest.mark.parametrize(
    "killed, hosts, begun",
    [
        ((0, 1), ["a", "a", "b", "b"], [2, 4, 2, "copies", None]),
        ((0, 1), None, [2, 3, 2, "checkpoint", None]),
        ((0, 2), None, [2, 4, 2, "copies", None]),
        ((3,), ["a", "a", "b", "b"], [3, 5, 1, "ranks", None]),
    ],
)
def test_copies_are_on_another_host_and_two_neighbours_are_not_both_lost(
    killed, hosts, begun, settings, tmp_path, monkeypatch
):
    """With shards on each host the other host has the whole state; then hosts are no longer alike."""
    kill_together(monkeypatch, killed, 4)
    settings = [*settings, "replication.zero=3", "run.copies_every=2", "checkpoint.every=3"]
    survive(4, [*settings, f"replication.shard={'host' if len(killed) == 1 else 'all'}"], hosts)
    assert restarts(tmp_path)[-1] == begun and [*losses(tmp_path)] == [*range(1, 10)]


def test_nothing_of_the_old_trainer_lives_on(settings, monkeypatch):
    trainers, alive = [], []
    init, pause = Trainer.__init__, Run.pause

    def made(own, *arguments, **named):
        init(own, *arguments, **named)
        trainers.append(weakref.ref(own))

    def begun(run, stop):
        if not run.stepped:
            run.transport.barrier()
            if run.transport.size == 2:
                gc.collect()
                alive.extend(one() for one in trainers[:3])
        return pause(run, stop)

    monkeypatch.setattr(Trainer, "__init__", made)
    monkeypatch.setattr(Run, "pause", begun)
    survive(3, [*settings, "run.inject=kill:1@5"])
    assert len(trainers) == 5 and alive == [None] * 6


REFUSED = {
    "layout.dp=3": "layout.dp is 3",
    "layout.tp=2 model.heads=2": "a replica to spare, but there is one of 2",
    "pipeline.schedule=async": "pipeline.schedule async",
    "run.copies_every=2 memory.limit_gb=0.0008": "With run.copies_every 3 rank(s) of localhost copy",
    "replication.mode=local": "replication.mode is local",
    "replication.algorithm=shared": "replication.algorithm is shared",
}


@pytest.mark.parametrize("keys", REFUSED)
def test_a_run_that_cannot_lose_a_rank_is_refused(keys, settings, tmp_path):
    with pytest.raises(ConfigError) as refused:
        survive(2 if "tp" in keys else 3, [*settings, *keys.split()])
    assert REFUSED[keys] in str(refused.value) and refused.value.agreed
    assert not (tmp_path / "run").exists()


def test_ranks_that_need_each_other_are_refused_with_the_reason(settings):
    config = parse(with_settings({}, settings))
    ranks = SimpleNamespace(needs_all="MPI X cannot lose a rank; Take MPI Y", size=3, spares=0)
    with pytest.raises(ConfigError, match=r"but MPI X cannot lose a rank\.\nTake MPI Y\."):
        check(config, ranks)
    ranks.needs_all, ranks.size = "", 1
    with pytest.raises(ConfigError, match="there is one rank"):
        check(config, ranks)


def test_a_recovery_that_takes_too_long_ends_the_job(settings):
    said, ended = [], threading.Event()
    ranks = ThreadTransport(World(3, True), (), range(3), 2, "aaa", Traffic(), Windows())
    waiting = Recovery(parse(with_settings({}, [*settings, "run.recover_seconds=1"])), ranks)
    ranks.abort = lambda text: (said.append(text), ended.set())
    ranks.survivors = lambda: ended.wait(SECONDS)
    ranks.gather_text = lambda value: [value]
    with pytest.raises(TrainingError, match="no rank is lost: a loss"):
        waiting.go_on("a loss")
    assert "run.recover_seconds 1: it was connecting the living ranks." in said[0]


def test_launch_restarts_on_the_hosts_that_answer_while_checkpoints_advance(settings, tmp_path):
    survive(4, [*settings, "layout.tp=2", "model.heads=2", "run.steps=4", "checkpoint.every=2"])
    run, dead = tmp_path / "run", set()
    config = parse(with_settings({}, [*settings, "layout.tp=2", "model.heads=2"]))
    restarts = Restarts({"a": 3, "b": 2}, 5, lambda host: host not in dead, lambda: config)

    def after(code=1, began=True, end="", agreed=False, report=b""):
        words = LauncherOutput()
        words.began, words.run, words.end = began, str(run) * began, end
        words.failure.is_agreed = agreed
        words.failure.read(report)
        again = restarts.after(words, code)
        return again and (again.hosts, again.ranks)

    for ended in (
        {"end": "stopped"},
        {"agreed": True},
        {"began": False},
        {"code": 85},
        {"code": 2},
        {"code": 0},
    ):
        assert after(**ended) is None, ended
    assert after() == ({"a": 3, "b": 2}, 4)  # two replicas of tp 2
    assert after() and after() and after() is None  # no newer checkpoint
    dead.add("b")
    assert after() == ({"a": 3}, 2)
    assert after() and after() and after() is None
    dead.add("a")
    assert after() is None
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000005")
    assert after() is None
    dead.clear()
    restarts = Restarts({}, 5, lambda host: False, lambda: config)
    assert after(137) == ({}, 4)
    restarts = Restarts({}, 5, lambda host: False, lambda: config)
    assert after(began=False, report=b"rank 1: ended by an exception on a\n") is None
    for lost in (
        b"rank 0: PeerLost: recv\n",
        b"rank 2: ended on a before the ranks were connected\n",
    ):
        assert after(began=False, report=lost) == ({}, 4)
    assert after(began=False, report=lost) and after(began=False, report=lost) is None
