"""A target of -100 does not count: any layout trains as PyTorch does on the whole batch with its `ignore_index`."""

import json
from functools import cache

import numpy as np
import pytest

from mpitrain.errors import DataError, TrainingError
from mpitrain.run.build import build
from mpitrain.run.replicas import replicas_equal
from mpitrain.transport.threads import run_ranks
from tests.masked import MASKED, MaskedTokens, V, packed
from tests.runs import TINY, go, records
from tests.training import configured, stepped

torch = pytest.importorskip("torch")
torch_gpt = pytest.importorskip("mpitrain.tools.bench.training.torch_gpt")

STEPS, SIZE = 3, 7
CLIP = 0.7


def trained(ranks, *settings, empty=(), steps=STEPS, made=None):
    """Initial tensors, (loss, norm, lr, updated, counted) of each step, the evaluation, and the tensors of rank 0."""

    def go(transport):
        source = made() if made else MaskedTokens(empty)
        context = f"model.context={source.shape[0]}"
        trainer = build(transport, configured(*MASKED, context, *settings), source=source).trainer
        tensors = trainer.tensors if not trainer.grid.is_server else dict
        before = tensors()
        outcomes = stepped(trainer, source, range(steps))
        trainer.sync_parameters()
        assert replicas_equal(trainer)
        found = [(o.loss, o.grad_norm, o.lr, o.updated, o.counted) for o in outcomes]
        return before, found, trainer.evaluate(source), tensors()

    return run_ranks(ranks, go)


def peer_of(tensors):
    context = len(tensors["embedding.positions"])
    model = torch_gpt.GPT(vocab=V, context=context, width=16, heads=2, depth=2, tied=False)
    torch_gpt.copy_weights(tensors, model.to(torch.float64))
    return model


def gradient(model, rows, clip=CLIP):
    """(loss, norm) of PyTorch's mean over the targets of these rows that count; the gradient stays in the model."""
    model.zero_grad()
    loss = torch_gpt.mean_loss(
        model.logits(_body(model, rows[0])), torch.from_numpy(rows[1].copy())
    )
    loss.backward()
    gradients = [tensor.grad for tensor in model.parameters()]
    norm = sum((gradient**2).sum() for gradient in gradients) ** 0.5
    for gradient in gradients:  # PyTorch's own clipping adds 1e-6 to the norm
        gradient *= min(1.0, clip / norm)
    return loss.item(), norm.item()


def _body(model, tokens):
    x = model.embedded(torch.from_numpy(tokens.copy()))
    for block in model.blocks:
        x = block(x)
    return x


def descend(model, lr):
    with torch.no_grad():
        for tensor in model.parameters():
            tensor -= lr * tensor.grad


def assert_tensors(tensors, model):
    """All tensors that are whole on this rank are those of the model."""
    theirs = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    whole = [
        (tensor, theirs[torch_gpt.torch_name(name)])
        for name, tensor in tensors.items()
        if tensor.shape == theirs[torch_gpt.torch_name(name)].shape
    ]
    assert all(np.abs(ours - true).max() <= 1e-12 for ours, true in whole)


@cache
def initial(made):
    """The initial tensors of all layouts."""
    return trained(1, steps=0, made=made)[0][0]


@pytest.fixture(scope="module")
def truth():
    return initial(MaskedTokens)


LAYOUTS = [
    (1, []),
    (1, ["batch.micro_batches=3"]),
    (2, []),
    (3, ["batch.micro_batches=2"]),
    (4, ["replication.overlap=false"]),
    (2, ["layout.tp=2"]),
    (2, ["layout.pp=2", "batch.micro_batches=3"]),
    (4, ["layout.dp=2", "layout.pp=2", "batch.micro_batches=3"]),
    (4, ["layout.dp=2", "layout.tp=2"]),
    (4, ["layout.dp=2", "layout.cp=2"]),
    (2, ["layout.cp=2", "layout.cp_mode=ring"]),
    (3, ["replication.zero=1"]),
    (3, ["replication.zero=2", "batch.micro_batches=2"]),
    (3, ["replication.zero=3", "batch.micro_batches=2"]),
    (3, ["replication.mode=master", "batch.micro_batches=2"]),
    (4, ["replication.mode=server", "replication.servers=2", "replication.update=sync"]),
    (2, ["replication.mode=server", "replication.servers=1", "replication.update=bounded"]),
]


@pytest.mark.parametrize(
    "made, ranks, settings",
    [*((MaskedTokens, *one) for one in LAYOUTS), *((packed, *one) for one in LAYOUTS[:13])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_losses_norms_and_parameters_are_pytorchs_over_the_whole_batch(made, ranks, settings):
    (_, outcomes, evaluated, _), *_ = found = trained(ranks, *settings, made=made)
    model, source = peer_of(initial(made)), made()
    for step, (loss, norm, lr, updated, _) in enumerate(outcomes):
        true_loss, true_norm = gradient(model, source.batch(0, step, SIZE, range(SIZE)))
        assert updated and true_norm > (CLIP if made is MaskedTokens else 0)
        assert abs(loss - true_loss) <= 1e-12 and abs(norm - true_norm) <= 1e-12
        descend(model, lr)
    mean, accuracy = evaluated
    inputs, targets = source.held_out_rows(range(source.held_out))
    with torch.no_grad():
        logits = model.logits(_body(model, inputs)).numpy()
    counts = targets != -100
    assert abs(mean - torch_gpt.mean_loss(*map(torch.from_numpy, (logits, targets)))) <= 1e-12
    assert accuracy == ((logits.argmax(-1) == targets) & counts).sum() / counts.sum()
    for *_, tensors in found:
        assert_tensors(tensors, model)


@pytest.mark.parametrize(
    "ranks, layout", [(1, []), (2, ["layout.pp=2"]), (4, ["layout.pp=2", "layout.dp=2"])]
)
def test_an_update_of_an_asynchronous_pipeline_divides_by_its_own_count(ranks, layout, truth):
    """The first update of 2BW is that of a plain step."""
    common = ["batch.micro_batches=2", "optimizer.clip=0.0", *layout]
    found = trained(ranks, *common, "pipeline.schedule=async-2bw", "run.steps=1", steps=1)
    loss, _, lr, *_ = found[0][1][0]
    model = peer_of(truth)
    true_loss, _ = gradient(model, MaskedTokens().batch(0, 0, SIZE, range(SIZE)), np.inf)
    assert abs(loss - true_loss) <= 1e-12
    descend(model, lr)
    for *_, tensors in found:
        assert_tensors(tensors, model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_update_of_pipedream_divides_by_the_count_of_its_micro_batch(ranks, truth):
    settings = ["batch.micro_batches=2", "optimizer.clip=0.0", "pipeline.schedule=async"]
    found = trained(ranks, *settings, "run.steps=1", steps=1)
    inputs, targets = MaskedTokens().batch(0, 0, SIZE, range(SIZE))
    model = peer_of(truth)
    for rows in ([0, 1, 2], [3, 4, 5, 6]) if ranks == 1 else ([0, 3, 4], [1, 2, 5, 6]):
        gradient(model, (inputs[rows], targets[rows]), np.inf)
        descend(model, found[0][1][0][2])
    for *_, tensors in found:
        assert_tensors(tensors, model)


def test_a_worker_that_averages_divides_by_its_own_count(truth):
    found = trained(2, "replication.mode=local", "replication.period=1", steps=1)
    (loss, *_), tensors = found[0][1][0], found[0][3]
    source, average, total = MaskedTokens(), {}, 0.0
    for rows in (range(3), range(3, 7)):
        model, mine = peer_of(truth), source.batch(0, 0, SIZE, rows)
        own_loss, _ = gradient(model, mine)
        total += own_loss * (mine[1] != -100).sum()
        descend(model, 0.5)
        for name, tensor in model.named_parameters():
            average[name] = average.get(name, 0) + len(rows) / SIZE * tensor.detach().numpy()
    for name, tensor in tensors.items():
        assert np.abs(tensor - average[torch_gpt.torch_name(name)]).max() <= 1e-12, name
    assert abs(loss - total / (source.batch(0, 0, SIZE, range(SIZE))[1] != -100).sum()) <= 1e-12


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (1, []),
        (2, ["replication.zero=2"]),
        (2, ["replication.mode=local", "replication.period=1"]),
        (3, ["replication.mode=server", "replication.servers=1", "replication.update=sync"]),
        (3, ["replication.mode=server", "replication.servers=1", "replication.update=bounded"]),
        (2, ["layout.pp=2", "batch.micro_batches=2", "pipeline.schedule=async"]),
    ],
    ids=str,
)
def test_a_batch_without_a_target_that_counts_is_a_skipped_step(ranks, settings):
    """No update follows from it, and the next step finds the parameters of the step before."""
    _, outcomes, _, _ = trained(ranks, *settings, empty=(1,))[0]
    assert [updated for *_, updated, _ in outcomes] == [True, False, True]
    assert [counted > 0 for *_, counted in outcomes] == [True, False, True]
    assert np.isnan(outcomes[1][0]) and np.isfinite(outcomes[2][0])


def test_without_masks_every_step_counts_all_targets():
    class Full(MaskedTokens):
        def batch(self, *arguments):
            inputs, targets = super().batch(*arguments)
            return inputs, np.abs(targets) % V

    def go(transport):
        trainer = build(transport, configured(*MASKED), source=Full()).trainer
        return trainer.step(0, *trainer.replica.batch(Full(), 0)).counted

    assert run_ranks(2, go) == [1.0, 1.0]


def test_an_evaluation_without_targets_is_refused_on_every_rank():
    class Empty(MaskedTokens):
        def held_out_rows(self, rows):
            inputs, targets = super().held_out_rows(rows)
            return inputs, targets * 0 - 100

    def go(transport):
        trainer = build(transport, configured(*MASKED), source=Empty()).trainer
        with pytest.raises(DataError) as raised:
            trainer.evaluate(Empty())
        return raised.value.agreed, raised.value.exit_code

    assert run_ranks(3, go) == [(True, 2)] * 3


@pytest.mark.compile
@pytest.mark.parametrize("ranks, settings", [(1, []), (2, ["layout.tp=2"])], ids=str)
def test_kernels_ignore_the_same_targets(ranks, settings):
    settings = [*settings, "precision.compute=float32"]
    of_device = [
        trained(ranks, *settings, f"device.kind={kind}", steps=2)[0] for kind in ("cpu", "cuda-sim")
    ]
    (_, host, host_evaluation, _), (_, found, evaluation, _) = of_device
    assert np.allclose(host, found, rtol=1e-5)
    assert np.allclose(host_evaluation, evaluation, rtol=1e-5)


def test_a_run_on_masked_data_alone_ends_and_blames_the_masks(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 500)
    settings = [*TINY, f"data.source=text:{tmp_path}/text", "data.separator=97", "run.steps=20"]
    with pytest.raises(TrainingError, match="no target") as raised:
        go(2, [*settings, f"run.out={tmp_path}/run"])
    assert "optimizer.lr" not in raised.value.way_out and "data.separator" in raised.value.way_out


def test_a_failure_with_asynchronous_servers_ends_all_ranks(tmp_path):
    (tmp_path / "text").write_bytes(b"a" * 500)
    servers = ["replication.mode=server", "replication.update=async", f"run.out={tmp_path}/run"]
    settings = [*TINY, f"data.source=text:{tmp_path}/text", "data.separator=97", "run.steps=20"]
    with pytest.raises(TrainingError, match="may not skip"):
        go(3, [*settings, *servers, "run.eval_every=-1"])


@pytest.mark.parametrize("servers", (0, 1))
def test_a_run_goes_on_after_a_step_without_a_target_that_counts(servers, tmp_path):
    lines = [{"prompt": "x" * (60 if n % 3 == 0 else 2), "answer": "yes"} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = [*TINY, f"data.source=jsonl:{tmp_path}/data.jsonl", f"run.out={tmp_path}/run"]
    if servers:
        settings += ["replication.mode=server", "replication.update=async"]
    settings += ["model.context=32", "batch.size=1", "run.epochs=1.0", "run.eval_every=-1"]
    go(1 + servers, settings)
    steps = [line for line in records(tmp_path) if "loss" in line]
    assert {line["loss"] is None for line in steps if line.get("empty")} == {True}
    assert 0 < sum("empty" in line for line in steps) < 5
    end = records(tmp_path)[-1]
    assert (end["event"], end["step"]) == ("end", 11)  # an epoch has each of 11 conversations once
