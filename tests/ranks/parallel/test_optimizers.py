"""Update rules train on every layout as on one rank, from state of any layout; with groups, too."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.optim import RULES
from mpitrain.optim.rules import is_hidden_matrix
from mpitrain.parallel.grid import Axes, Grid
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.transport.threads import run_ranks
from tests.cases.rules import TOYS
from tests.laws.collectives import measured
from tests.saving import load, save
from tests.training import TINY, configured, near, stepped

pytestmark = pytest.mark.slow
STEPS = 4
EXACT = [*TINY, "precision.compute=float64", "model.layers=1"]
GROUPS = 'optimizer.groups=[{match="embedding.*", weight_decay=0.0, lr=0.5}, {match="*.bias", weight_decay=0.2}]'
ZERO, TIED = "replication.zero=", "model.tied=true"
LAYOUTS = [
    (2, []),
    (2, [ZERO + "1", "replication.overlap=false"]),
    (3, [ZERO + "2", "batch.micro_batches=2"]),
    (2, ["layout.tp=2"]),
    (5, [ZERO + "3"]),
    (4, ["layout.tp=2", ZERO + "1"]),
    (2, ["layout.pp=2", "pipeline.schedule=zb-v", "batch.micro_batches=2"]),
    (4, ["layout.tp=2", "layout.sequence_parallel=true", ZERO + "2"]),
    (4, ["layout.pp=2", "pipeline.schedule=gpipe", "batch.micro_batches=2", ZERO + "3"]),
    (8, ["layout.tp=2", "layout.pp=2", "batch.micro_batches=2"]),
    (3, ["replication.mode=server", "replication.servers=2"]),
    (2, ["replication.mode=master"]),
    (4, [ZERO + "2", "replication.shard=host"]),
    (1, []),
]
"""In the order in which one loads what the one before it has written."""


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    for name, rule in TOYS.items():
        monkeypatch.setitem(RULES, name, rule)


def trained(transport, settings, folder, first=0, stop=STEPS, path=None):
    """Losses and norms of some steps from a checkpoint, the same checkpoint as this layout writes it, and the last one."""
    config = configured(*EXACT, *settings)
    trainer, source, _ = build(transport, config)
    again = None
    if path:
        load(path, trainer)
        again = save(folder, trainer, Done(first, 12 * first, "run"), 9)
    results = stepped(trainer, source, range(first, stop))
    told = np.array([(each.loss, each.grad_norm) for each in results])
    return told, again, save(folder, trainer, Done(stop, 12 * stop, "run"), 9)


def everything(path, settings):
    """All parameters and state of a checkpoint by tensor: as one rank loads them."""

    def run(transport):
        trainer = build(transport, configured(*EXACT, *settings)).trainer
        load(path, trainer)
        return {
            (one.name, entry.name): entry._replace(start=entry.start - piece.start)
            .view(one.array[piece.offset :])
            .copy()
            for one in trainer.replica.state()
            for entry in one.entries or trainer.storage.entries
            for piece in one.pieces
            if piece.start <= entry.start and entry.stop <= piece.stop
        }

    return run_ranks(1, run)[0]


def serves(*settings):
    """Whether a rule serves a layout: a muon updates whole matrices."""
    try:
        return bool(configured(*TINY, *settings))
    except ConfigError as refused:
        assert "layout.tp" in refused.law
        return False


def without_keys(found, rule):
    """Tensors without key biases in Adam, Lion and Adafactor: their gradient is rounding alone, which these make a step."""
    if rule not in ("adam", "lion", "adafactor"):
        return found
    return {
        key: np.delete(array.reshape(3, -1), 1, 0) if key[1].endswith("qkv.bias") else array
        for key, array in found.items()
    }


OWN = {
    "normalised": ([], LAYOUTS[::4]),
    "nesterov": ([], LAYOUTS[1::3]),
    "lion": ([TIED, GROUPS], LAYOUTS[2::3]),
    "lamb": ([GROUPS, "optimizer.lr=0.05"], LAYOUTS[::2]),
    "adafactor": ([TIED, GROUPS, "optimizer.lr=0.2"], LAYOUTS),
    "muon": ([TIED, GROUPS], LAYOUTS),
}
"""Rule -> (settings, layouts); every other rule has these of Adam: [TIED, GROUPS], LAYOUTS[::3]."""
ELSEWHERE = ("sgd", "momentum", "adamw", "adamw8bit")
"""The rules of most tests of layouts and checkpoints, and one with a file of its own."""


@pytest.mark.parametrize(
    "rule, settings, layouts",
    [
        pytest.param(name, *OWN.get(name, ([TIED, GROUPS], LAYOUTS[::3])), id=name)
        for name in {**OWN, **RULES}
        if name not in ELSEWHERE
    ],
)
def test_every_layout_goes_on_as_one_rank_from_what_another_layout_wrote(
    rule, settings, layouts, tmp_path
):
    """Nesterov, Lion and Adam share the layouts: of rules by elements, all state lies where the parameters lie."""
    own = [f"optimizer.name={rule}", *settings]
    curve, _, before = run_ranks(1, trained, own, tmp_path / "start", 0, 2)[0]
    alone, _, end = run_ranks(1, trained, own, tmp_path / "end", 2, STEPS, before)[0]
    assert np.ptp([*curve[:, 0], *alone[:, 0]]) > 0.05, "the loss must move"
    wanted, start = without_keys(everything(end, own), rule), everything(before, own)
    assert {name for name, _ in wanted} == {"parameters", *RULES[rule].state}
    for number, (ranks, layout) in enumerate(layouts):
        if not serves(*own, *layout):
            continue
        folder, hosts = (
            tmp_path / str(number),
            "aabb" if "replication.shard=host" in layout else None,
        )
        steps = [*own, *layout], folder, 2, STEPS, before
        results = run_ranks(ranks, trained, *steps, hosts=hosts)
        assert all(near([alone], [found]) for found, *_ in results), layout
        _, before, end = results[0]
        found = without_keys(everything(end, own), rule)
        assert found.keys() == wanted.keys()
        for key, array in wanted.items():
            assert near([array], [found[key]]), (key, layout)
    for key, array in everything(before, own).items():
        assert np.array_equal(array, start[key]), f"{key} after all layouts"


@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[2::3], pytest.param([(1, ["device.kind=cuda-sim"])], marks=pytest.mark.compile)],
    ids=["host", "kernels"],
)
def test_moments_of_8_bits_go_on_from_what_another_layout_wrote(layouts, tmp_path):
    """The loss within 0.01 nats of one rank, and of float32 moments; the same layout has the same bits."""
    wide = ["model.width=32", "optimizer.lr=0.004"]
    own = ["optimizer.name=adamw8bit", *wide]
    plain = run_ranks(1, trained, wide, tmp_path / "plain", 0, STEPS)[0][0]
    curve, _, start = run_ranks(1, trained, own, tmp_path / "start", 0, 2)[0]
    alone, again, _ = run_ranks(1, trained, own, tmp_path / "end", 2, STEPS, start)[0]
    assert np.abs(plain[:, 0] - [*curve[:, 0], *alone[:, 0]]).max() < 0.01
    for (key, array), same in zip(
        everything(start, own).items(), everything(again, own).values(), strict=True
    ):
        assert np.array_equal(array, same), key
    before = start
    for number, (ranks, settings) in enumerate(layouts):
        hosts = "aabb" if "replication.shard=host" in settings else None
        folder = tmp_path / str(number)
        results = run_ranks(
            ranks, trained, [*own, *settings], folder, 2, STEPS, before, hosts=hosts
        )
        for found, *_ in results:
            assert np.abs(found[:, 0] - alone[:, 0]).max() < 0.01, settings
        before = results[0][1]
    for (key, array), last in zip(
        everything(start, own).items(), everything(before, own).values(), strict=True
    ):
        # Each of the layouts may move a value by a code.
        assert np.abs(array - last).max() <= 0.02 * np.abs(array).max() + 1e-30, key


def made(transport, *settings):
    """A trainer after three steps, its traffic of the last one, and whether that took no more memory than the second."""
    trainer, source, _ = build(transport, configured(*TINY, "model.layers=1", *settings))
    allocations = []
    for index in range(3):
        traffic = measured(transport, lambda index=index: stepped(trainer, source, [index]))
        allocations.append(trainer.arena.allocations)
    trainer.sync_parameters()
    return trainer, np.array(traffic), allocations[1] == allocations[2]


@pytest.mark.parametrize("compute", ("float64", "bfloat16"))
@pytest.mark.parametrize(
    "rule, ranks, hosts, settings",
    [
        ("adafactor", 3, "aab", [ZERO + "2"]),
        ("adafactor", 4, "aaab", ["layout.tp=2", ZERO + "1"]),
        ("lamb", 6, "aaabbb", ["layout.pp=2", "batch.micro_batches=2", TIED, ZERO + "1"]),
        ("adafactor", 4, "abbb", ["layout.tp=2", "layout.pp=2", "batch.micro_batches=2", TIED]),
        ("muon", 6, "aaabbb", ["layout.pp=2", "batch.micro_batches=2", TIED, ZERO + "1"]),
        ("muon", 4, "aabb", [ZERO + "3", "replication.shard=host"]),
    ],
)
def test_replicated_elements_have_equal_bits_of_parameters_and_state(
    rule, ranks, hosts, settings, compute
):
    def run(transport):
        trainer, *_ = made(
            transport, f"optimizer.name={rule}", f"precision.compute={compute}", *settings
        )
        own = {
            (one.name, entry.name): entry.view(one.array).tobytes()
            for one in trainer.replica.state()
            for entry in one.entries
        }
        return (
            own,
            {name: array.tobytes() for name, array in trainer.tensors().items()},
            ({e.name for e in trainer.storage.entries if e.parameter.slices is None}),
        )

    states, tensors = {}, {}
    for own, parameters, whole in run_ranks(ranks, run, hosts=hosts):
        for key, bits in own.items():
            assert states.setdefault(key, bits) == bits, key
        for name in whole:
            assert tensors.setdefault(name, parameters[name]) == parameters[name], name
    assert (len(states) > 10 or rule != "adafactor") and tensors


@pytest.mark.parametrize(
    "ranks, settings, sharing", [(3, [], 1), (4, [ZERO + "1"], 4), (4, ["layout.tp=2"], 2)]
)
def test_each_round_is_one_all_reduce_without_later_allocations(ranks, settings, sharing):
    def run(transport, rule):
        trainer, traffic, is_steady = made(transport, f"optimizer.name={rule}", *settings)
        return traffic, is_steady, [entry.parameter.shape for entry in trainer.storage.entries]

    plain, found = (run_ranks(ranks, run, rule) for rule in ("sgd", "adafactor"))
    for (before, *_), (after, is_steady, tensors) in zip(plain, found, strict=True):
        numbers = sum(sum(shape) + 2 for shape in tensors)
        doublings = sharing.bit_length() - 1
        assert [*(after - before)] == [2 * doublings, 8 * doublings * numbers]
        assert is_steady


@pytest.mark.parametrize("schedule", ("async", "async-2bw"))
def test_async_stages_sum_over_their_tensor_parallel_group(schedule):
    settings = ["layout.pp=2", f"pipeline.schedule={schedule}", "batch.micro_batches=2"]

    def run(transport, tp):
        trainer, *_ = made(
            transport,
            "optimizer.name=adafactor",
            "precision.compute=float64",
            f"layout.tp={tp}",
            *settings,
        )
        return {
            (one.name, entry.name): entry.view(one.array).copy()
            for one in trainer.replica.state()
            for entry in one.entries
        }

    alone, together = (
        {key: array for own in run_ranks(2 * tp, run, tp) for key, array in own.items()}
        for tp in (1, 2)
    )
    assert alone.keys() == together.keys() and len(alone) > 10
    for key, array in alone.items():
        assert near([array], [together[key]]), key


@pytest.mark.parametrize("mode", ("local", "gossip"))
def test_averaging_workers_start_from_the_mean_state(mode, tmp_path):
    own = ["optimizer.name=adafactor", f"replication.mode={mode}", "replication.period=2"]
    before = run_ranks(2, trained, own, tmp_path / "two", 0, 3)[0][2]
    one = everything(before, ["optimizer.name=adafactor"])

    def run(transport):
        trainer = build(transport, configured(*EXACT, *own)).trainer
        load(before, trainer)
        return {
            (state.name, entry.name): entry.view(state.array)
            for state in trainer.replica.state()
            for entry in state.entries
        }

    first, second = run_ranks(2, run)
    assert len(first) > 10
    for key in first:
        assert near([(first[key] + second[key]) / 2], [one[key]]), key


@pytest.mark.compile
@pytest.mark.parametrize("rule", ("lamb", "adafactor", "muon"))
def test_on_a_device_rules_of_tensors_are_those_of_the_host(rule):
    """But for key biases, whose gradient is rounding alone."""
    settings = ["device.kind=cuda-sim", ZERO + "1", "layout.dp=2"]

    def run(transport, *more):
        name = f"optimizer.name={rule}"
        return made(transport, name, *more)[0].tensors()

    (alone,), (one, other) = run_ranks(1, run), run_ranks(2, run, *settings)
    for key, array in alone.items():
        assert np.array_equal(one[key], other[key])
        assert key.endswith("qkv.bias") or np.abs(array - one[key]).max() < 1e-6, key


def test_zero_sends_a_divided_matrix_of_muon_to_its_owner_and_back():
    def run(transport, rule):
        trainer, traffic, is_steady = made(transport, f"optimizer.name={rule}", ZERO + "1")
        held = [
            (entry.name, min(entry.stop, piece.stop) - max(entry.start, piece.start))
            for piece in trainer.replica.optimizer.pieces
            for entry in trainer.storage.entries
            if is_hidden_matrix(entry.parameter)
        ]
        return traffic[1], is_steady, {name: count for name, count in held if count > 0}

    plain, found = (run_ranks(3, run, rule) for rule in ("adamw", "muon"))
    counts = {}
    for _, is_steady, held in found:
        assert is_steady
        for name, count in held.items():
            counts.setdefault(name, []).append(count)
    divided = [each for each in counts.values() if len(each) > 1]
    extra = sum(after - before for (before, *_), (after, *_) in zip(plain, found, strict=True))
    assert 8 * sum(sum(each) - max(each) for each in divided) <= extra
    assert extra <= 8 * sum(sum(each) - min(each) for each in divided) and divided


@pytest.mark.parametrize("ranks, hosts", [(3, "aab"), (5, "aabba"), (6, "ababab")])
def test_a_sum_of_facts_has_the_same_bits_at_any_offset_and_on_all_ranks(ranks, hosts):
    def run(transport):
        grid = Grid(transport, Axes(dp=ranks))
        mine, found = np.random.default_rng(transport.rank).standard_normal(90), []
        for offset, length in ((0, 90), (33, 200), (7, 101)):
            vector = np.zeros(length)
            vector[offset : offset + 90] = mine
            grid.fact_sums(grid.copies, grid.tp).bind(vector)()
            found.append(vector[offset : offset + 90].tobytes())
        return found

    assert len({bits for found in run_ranks(ranks, run, hosts=hosts) for bits in found}) == 1
