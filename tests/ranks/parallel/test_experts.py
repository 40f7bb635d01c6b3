"""A mixture of experts trains alike in every layout, whatever the router chooses; its bytes are counted."""

from functools import partial

import numpy as np
import pytest

from mpitrain.collectives.group import Group
from mpitrain.collectives.routes import route_bytes
from mpitrain.config import Model
from mpitrain.data import IGNORED
from mpitrain.errors import ConfigError
from mpitrain.layers.base import READING, Now
from mpitrain.layers.plain import Plain
from mpitrain.machine.backend import Arena, HostBackend
from mpitrain.ops.device import host_ops
from mpitrain.ops.host import experts as host
from mpitrain.ops.reference.experts import choose
from mpitrain.run.build import build
from mpitrain.run.checkpoint.manifest import Done
from mpitrain.run.generate import Sampling, texts
from mpitrain.tools.report.text import experts as experts_of
from mpitrain.transport.threads import run_ranks
from tests.laws.collectives import measured
from tests.laws.layers import draw, placed
from tests.runs import TINY as RUN
from tests.runs import go, records
from tests.saving import load, save
from tests.training import TINY, configured, curve, held, near, stepped

pytestmark = pytest.mark.slow

EXPERTS = [
    *TINY,
    "precision.compute=float64",
    "model.experts=4",
    "model.balance=0.1",
    "model.z=0.01",
]
ON_HOSTS = ["replication.zero=1", "replication.shard=host"]
LAYOUTS = (
    (3, "batch.micro_batches=2"),
    (2, "replication.zero=3", "memory.recompute=unit"),
    (4, "layout.pp=2", "pipeline.schedule=zero-bubble", "memory.recompute=attention"),
    (2, "layout.ep=2"),
    (4, "layout.ep=2", "batch.micro_batches=3"),
    (4, "layout.ep=4", "memory.recompute=unit"),
    (2, "layout.ep=2", "replication.zero=1"),
    (4, "layout.ep=2", "replication.zero=1", "replication.overlap=false"),
    (4, "layout.ep=2", "replication.zero=2", "batch.micro_batches=2"),
    (4, "layout.ep=2", "replication.zero=3"),
    (4, "layout.ep=4", "replication.zero=3", "memory.recompute=attention"),
    (2, "layout.tp=2"),
    (4, "layout.tp=2", "layout.ep=2", "memory.recompute=unit"),
    (4, "layout.tp=2", "layout.pp=2", "batch.micro_batches=2"),
    (4, "layout.tp=2", "layout.ep=2", "layout.sequence_parallel=true"),
    (4, "layout.ep=2", "layout.pp=2", "batch.micro_batches=2"),
    (4, "layout.ep=2", "layout.pp=2", "pipeline.schedule=zero-bubble"),
)


CONTEXTS = (
    (2, "layout.cp=2"),
    (4, "layout.cp=2", "layout.ep=2", "batch.micro_batches=2"),
    (4, "layout.cp=2", "layout.cp_mode=ring", "layout.tp=2"),
)


ALL = LAYOUTS + CONTEXTS
RING = (4, "layout.cp=2", "layout.cp_mode=ring", "layout.ep=2")
"""Each rank has tokens before and after the other's, and an expert's capacity goes to those that come first."""


def unlike(logits, k, before, arena):
    """All tokens choose expert 2 first, and none chooses expert 1."""
    logits += np.array([0, -9, 9, 0])
    return choose(logits, k, before, arena)


@pytest.mark.parametrize(
    "settings, chosen, layouts",
    [
        (("model.kind=llama",), choose, ALL[::2]),
        (
            ("model.capacity=0.6", "model.router=before", "model.shared=8"),
            choose,
            (*ALL[1::2], RING),
        ),
        (("model.top_k=1", "model.dropout=0.25", "model.balance=0.0"), unlike, ALL[1::3]),
    ],
    ids=["llama", "capacity", "all choose one"],
)
def test_in_float64_every_layout_equals_one_rank(settings, chosen, layouts, monkeypatch):
    monkeypatch.setattr(host, "choose", chosen, raising=False)

    def trained(ranks, *layout, steps=4):
        """What each rank is told of the steps."""
        config = configured(*EXPERTS, *settings, *layout)
        return run_ranks(ranks, lambda transport: curve(transport, config, steps)[:2])

    (alone,) = trained(1)
    assert np.ptp(alone[0]) > 0.05
    for ranks, *layout in layouts:
        for found in trained(ranks, *layout):
            assert near(alone, found), layout


def test_a_checkpoint_of_some_experts_continues_in_any_layout(tmp_path):
    """Four steps in one layout and four in another end as eight on one rank."""

    def part(transport, layout, steps, path=None):
        trainer, source, _ = build(transport, configured(*EXPERTS, *layout))
        if path:
            load(path, trainer)
        results = stepped(trainer, source, steps)
        losses = [[one.loss, *one.extras["expert_tokens"]] for one in results]
        return (
            losses,
            save(tmp_path, trainer, Done(steps.stop, steps.stop * 12, "a run"), 99),
            held(trainer),
        )

    ((losses, _, whole),) = run_ranks(1, part, (), range(8))
    layouts = ((1,), (2, "layout.ep=2"), (4, "layout.ep=2", "replication.zero=3"))
    layouts = *layouts, (4, "layout.ep=2", "layout.tp=2")
    for first, second in ((0, 1), (1, 2), (2, 3), (3, 0)):
        ranks, *layout = layouts[first]
        path = run_ranks(ranks, part, layout, range(4))[0][1]
        ranks, *layout = layouts[second]
        for found, _, tensors in run_ranks(ranks, part, layout, range(4, 8), path):
            assert np.abs(np.subtract(found, losses[4:])).max() < 1e-9, (first, second)
            for name, (parameter, values) in tensors.items():
                assert np.abs(values - parameter.part_of(whole[name][1])).max() < 1e-9, name


def test_ranks_that_divide_experts_write_and_evaluate_together():
    """One prompt, and rows that the replicas cannot divide equally."""

    def done(transport, *layout):
        trainer, source, _ = build(transport, configured(*EXPERTS, "run.eval_rows=7", *layout))
        told = [*texts(trainer, [[70, 71, 72]], Sampling(), 5, 4, lambda index, token: False)]
        return told, trainer.evaluate(source)

    ((told, evaluated),) = run_ranks(1, done)
    for ranks, *layout in ((2, "layout.ep=2"), (4, "layout.ep=2")):
        for own, own_evaluated in run_ranks(ranks, done, *layout):
            assert own == told and np.abs(np.subtract(own_evaluated, evaluated)).max() < 1e-9


def test_a_layer_sends_what_the_formula_says_of_its_loads():
    """Forward and backward: tokens there and back, twice; each forward tells its counts once."""
    width, experts, n = 6, 4, 2

    def sent(transport):
        group = Group(transport, "pairwise")
        plain = Plain(host_ops(), Model(experts=experts), ep=group)
        layer = plain.experts(width, 5, draw, draw, is_gated=True)
        weights, *_ = placed(layer, HostBackend())
        own = {name: {"weight": weights[name]["weight"][: experts // n]} for name in ("up", "down")}
        weights = {**weights, **own}
        x = np.random.default_rng(transport.rank).standard_normal((3, 5, width))
        logits = x.reshape(-1, width) @ weights["router"]["weight"].T
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, :2].reshape(-1)
        load = np.bincount(chosen // (experts // n), minlength=n)
        rows = np.array(transport.gather_text(load.tolist()))

        def run():
            _, saved = layer.forward(weights, x, Now(0, 0, 3, True), Arena())
            layer.backward_input(weights, x, saved, Arena())

        _, nbytes = measured(transport, run)
        assert group.exposed.seconds > 0, "a step's comm_s has the waits for tokens"
        there, back = (
            route_bytes(transport.rank, transport.hosts, each, width * 8, "pairwise")
            for each in (rows, rows.T)
        )
        return nbytes - 2 * (there + back)

    # The all-gather of E counts: each rank sends its E numbers of 8 bytes to the other one.
    assert run_ranks(n, sent) == [8 * experts] * n


@pytest.mark.parametrize(
    "layout, expected",
    [((), 0), (("layout.ep=2",), 4), (("layout.ep=2", "memory.recompute=unit"), 8)],
)
def test_the_host_reads_the_device_within_a_step_for_messages_of_experts_alone(
    layout, expected, monkeypatch
):
    """Of 2 layers and 2 micro-batches; beside it a step reads its facts, and the tally of tokens."""

    def reads(transport):
        settings = [*EXPERTS, "batch.micro_batches=2", *layout]
        trainer, source, _ = build(transport, configured(*settings))
        arrays = []
        monkeypatch.setattr(trainer.backend, "to_host", lambda array: arrays.append(array) or array)
        stepped(trainer, source, range(1))
        return len(arrays)

    for count in run_ranks(2, reads):
        assert count == expected + 2


def test_the_terms_of_the_loss_are_means_over_the_targets_that_count():
    """The step of sgd with them differs from that without them by their gradient alone."""

    def pull(transport, weight, mask):
        """What one term adds to all parameters in a step."""
        settings = [*EXPERTS, "optimizer.name=sgd", "optimizer.clip=0.0", "optimizer.warmup=0"]
        settings += ["optimizer.weight_decay=0.0", "batch.micro_batches=2"]
        ends = []
        for terms in (weight, 0):
            more = [f"model.balance={10 * terms}", f"model.z={terms}"]
            trainer, source, _ = build(transport, configured(*settings, *more))
            share = trainer.share()
            inputs, targets = (rows.copy() for rows in trainer.replica.batch(source, 0))
            mask(slice(share.start, share.stop), inputs, targets)
            trainer.step(0, inputs, targets)
            ends.append({name: values for name, (_, values) in held(trainer).items()})
        return np.concatenate([(ends[0][name] - ends[1][name]).ravel() for name in ends[0]])

    def none(rows, inputs, targets):
        pass

    def half(rows, inputs, targets):
        targets[:, ::2] = IGNORED

    def but_last(rows, inputs, targets, token=65):
        own = np.arange(rows.start, rows.stop) < 7
        inputs[own], targets[own] = token, IGNORED

    (whole,) = run_ranks(1, pull, 1.0, none)
    assert np.abs(whole).max() > 1e-3
    for other in run_ranks(2, pull, 1.0, half):
        assert np.abs(other - whole).max() < 1e-9
    (masked,) = run_ranks(1, pull, 1.0, but_last)
    for other in run_ranks(3, pull, 1.0, partial(but_last, token=66)):
        assert np.abs(other - masked).max() < 1e-9, "a row without targets counts"


@pytest.mark.parametrize(
    "ranks, layout",
    [
        (3, ["replication.mode=server", "replication.update=async"]),
        (2, ["layout.pp=2", "pipeline.schedule=async-2bw", "batch.micro_batches=2"]),
    ],
)
def test_ranks_without_common_steps_train_experts_and_do_not_sum_their_tokens(
    ranks, layout, tmp_path
):
    go(
        ranks,
        [*RUN, "model.experts=4", "run.eval_every=-1", f"run.out={tmp_path / 'run'}", *layout],
    )
    steps = [record for record in records(tmp_path) if "grad_norm" in record]
    assert len(steps) == 6 and not any("expert_tokens" in record for record in steps)


def test_a_report_has_the_imbalance_of_the_experts_and_what_they_dropped(tmp_path):
    job = ["model.experts=4", "model.capacity=1.0", "run.eval_every=-1"]
    go(2, [*RUN, *job, "layout.ep=2", f"run.out={tmp_path / 'run'}"])
    steps = [record for record in records(tmp_path) if "grad_norm" in record]
    each = [max(step["expert_tokens"]) / np.mean(step["expert_tokens"]) for step in steps]
    (line,) = experts_of(steps)
    assert f" {np.median(each):.2f} times as often" in line and f" {max(each):.2f} times;" in line
    assert f"; {100 * np.mean([step['dropped'] for step in steps]):.1f}% of" in line
    assert steps[0]["dropped"] > 0 and not [*experts_of([{"loss": 1.0}])]


def test_no_token_is_dropped_outside_of_training():
    """The output for a row does not depend on the others; in training an expert takes at least one token."""
    layer = Plain(host_ops(), Model(experts=4, capacity=0.5)).experts(6, 5, draw, draw)
    weights, *_ = placed(layer, HostBackend())
    x = np.random.default_rng(3).standard_normal((1, 8, 6))
    for length in (1, 8):
        reading, _ = layer.forward(weights, x[:, :length], READING, Arena())
        training, _ = layer.forward(weights, x[:, :length], Now(0, 0, 1, True), Arena())
        assert (
            np.abs(reading - training).max() < 1e-12 if length == 1 else (reading != training).any()
        )
        alone = [layer.forward(weights, x[:, [at]], READING, Arena())[0] for at in range(length)]
        assert np.abs(reading - np.concatenate(alone, 1)).max() < 1e-12
    crowd = np.repeat(x[:, :1], 2, axis=1)
    outputs, _ = layer.forward(weights, crowd, Now(0, 0, 1, True), Arena())
    assert outputs[0, 0].any() and not outputs[0, 1].any()


@pytest.mark.parametrize(
    "ranks, settings, law",
    [
        (3, ["layout.ep=2"], "but 2 does not divide 3"),
        (3, ["layout.ep=3"], "layout.ep divides model.experts, but 3 does not divide 4"),
        (1, ["model.top_k=5"], "but 5 of 4"),
        (1, ["model.capacity=0.1"], "less than 1 token"),
        (2, ["layout.ep=2", "model.experts=0", "model.balance=0.01", "model.z=0.0"], "experts 0"),
        (2, ["layout.ep=2", "optimizer.name=lamb"], "optimizer.name lamb needs whole"),
        (2, ["layout.ep=2", "replication.mode=local"], "Mode local needs layout.ep 1"),
        (1, ["model.kind=llama", "model.activation=gelu"], "gates of experts are silu"),
        (1, ["model.kind=mlp", "data.source=digits"], "model.experts is for a gpt or llama"),
        (1, ["model.experts=0", "model.z=0.0"], "model.balance is 0.1 and model.experts is 0"),
        (6, [*ON_HOSTS, "layout.ep=2"], "as many replicas of each part of the experts"),
    ],
)
def test_what_cannot_be_is_refused(ranks, settings, law):
    def refused(transport):
        with pytest.raises(ConfigError) as caught:
            build(transport, configured(*EXPERTS, *settings))
        return str(caught.value)

    for text in run_ranks(ranks, refused, hosts="aaabbb"[:ranks]):
        assert law in text, text
