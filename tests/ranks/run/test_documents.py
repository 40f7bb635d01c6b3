"""Packed documents: with data.attend=document a packed row trains as its documents do in rows of their own."""

import json
from functools import partial, partialmethod

import numpy as np
import pytest

from mpitrain.data import DOCUMENT_END, IGNORED, Reading, open_source
from mpitrain.errors import ConfigError, DataError
from mpitrain.layers.base import Unit, zeros
from mpitrain.layers.plain import Plain
from mpitrain.ops.device import device_for
from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as reopened
from mpitrain.run.trainer import Trainer
from mpitrain.transport.threads import run_ranks
from tests.masked import MASKED
from tests.runs import TINY, go, records
from tests.training import configured, stepped

V, T, SIZE, DOCUMENTS = 11, 8, 7, 3
CUT = ["data.attend=document", "data.packing=true"]


def drawn(seed, step, size):
    """Return (tokens, targets) of each document: DOCUMENTS for each row of T tokens."""
    rng = np.random.default_rng([seed, step])
    rows = []
    for _ in range(size):
        ends = np.sort(rng.choice(np.arange(1, T), DOCUMENTS - 1, replace=False))
        for count in np.diff([0, *ends, T]):
            tokens, targets = rng.integers(V, size=(2, count))
            targets[rng.random(count) < 0.2] = IGNORED
            targets[-1] = IGNORED
            rows.append((tokens, targets))
    return rows


class Packed:
    """Rows of DOCUMENTS documents each."""

    form, shape, inputs, classes, held_out = "tokens", (T,), V, V, SIZE

    def batch(self, seed, step, size, rows, before=None):
        documents = drawn(seed, step, SIZE)
        inputs, targets = (np.concatenate([one[n] for one in documents]) for n in (0, 1))
        targets[np.cumsum([len(tokens) for tokens, _ in documents]) - 1] = DOCUMENT_END
        return tuple(one.reshape(SIZE, T)[rows.start : rows.stop] for one in (inputs, targets))

    def held_out_rows(self, rows):
        return tuple(one[list(rows)] for one in self.batch(9, 0, SIZE, range(SIZE)))


class Alone(Packed):
    """The same documents, each in a row of its own."""

    held_out = SIZE * DOCUMENTS

    def batch(self, seed, step, size, rows, before=None):
        inputs = np.zeros((SIZE * DOCUMENTS, T), np.int64)
        targets = np.full(inputs.shape, IGNORED)
        for x, y, (tokens, wanted) in zip(inputs, targets, drawn(seed, step, SIZE), strict=True):
            x[: len(tokens)], y[: len(tokens)] = tokens, wanted
        return inputs[rows.start : rows.stop], targets[rows.start : rows.stop]

    def held_out_rows(self, rows):
        return tuple(
            one[list(rows)] for one in self.batch(9, 0, self.held_out, range(self.held_out))
        )


class Ended(Alone):
    """The same rows, whose padding is marked as not of the document."""

    def batch(self, *given, before=None):
        inputs, targets = super().batch(*given)
        documents = drawn(*given[:2], SIZE)[given[3].start : given[3].stop]
        for row, (tokens, _) in zip(targets, documents, strict=True):
            row[len(tokens) - 1] = DOCUMENT_END
        return inputs, targets


def trained(ranks, source, *settings, steps=3):
    """(loss, norm) of each step, the evaluation, and the tensors of each rank."""

    def go(transport):
        config = configured(*MASKED, f"model.context={T}", *settings)
        trainer = build(transport, config, source=source).trainer
        found = stepped(trainer, source, range(steps))
        trainer.sync_parameters()
        evaluated = trainer.evaluate(source)
        tensors = {} if trainer.grid.is_server else trainer.tensors()
        return [(one.loss, one.grad_norm) for one in found], evaluated, tensors

    return run_ranks(ranks, go)


@pytest.fixture(scope="module")
def truth():
    return trained(1, Alone(), f"batch.size={SIZE * DOCUMENTS}")[0]


LAYOUTS = [
    (1, []),
    (1, ["batch.micro_batches=3"]),
    (1, ["memory.attention=tiled"]),
    (1, ["memory.recompute=attention"]),
    (1, ["memory.recompute=2", "memory.logit_chunks=2"]),
    (2, []),
    (4, ["replication.overlap=false"]),
    (2, ["layout.tp=2", "memory.recompute=unit"]),
    (2, ["layout.pp=2", "batch.micro_batches=3"]),
    (3, ["layout.pp=3", "batch.micro_batches=3", "pipeline.schedule=zero-bubble"]),
    (4, ["layout.dp=2", "layout.pp=2", "batch.micro_batches=3", "pipeline.schedule=gpipe"]),
    (4, ["layout.tp=2", "layout.pp=2"]),
    (2, ["layout.tp=2", "layout.sequence_parallel=true"]),
    (3, ["replication.zero=3", "batch.micro_batches=2"]),
    (2, ["layout.cp=2", "memory.recompute=unit"]),
    (4, ["layout.cp=2", "replication.zero=3", "batch.micro_batches=2"]),
    (4, ["layout.cp=2", "layout.pp=2", "batch.micro_batches=3"]),
    (4, ["layout.cp=4", "layout.cp_mode=ring", "memory.recompute=unit"]),
    (3, ["replication.mode=master", "batch.micro_batches=2"]),
    (3, ["replication.mode=server", "replication.servers=1", "replication.update=sync"]),
]


@pytest.mark.parametrize("ranks, settings", LAYOUTS, ids=str)
def test_packed_documents_train_as_in_rows_of_their_own(ranks, settings, truth):
    check_packed(ranks, settings, truth)


@pytest.mark.parametrize("ranks, settings", [LAYOUTS[n] for n in (0, 2, 4, 7, 13, 15, 16)], ids=str)
def test_so_do_documents_without_the_causal_mask(ranks, settings, monkeypatch):
    monkeypatch.setattr(Plain, "attention", partialmethod(Plain.attention, causal=False))
    check_packed(ranks, settings, trained(1, Ended(), *CUT, f"batch.size={Ended.held_out}")[0])


WINDOW = "model.window=3"


@pytest.mark.parametrize("ranks, settings", [LAYOUTS[n] for n in (0, 2, 4, 7, 13, 15, 16)], ids=str)
def test_so_do_documents_within_a_window(ranks, settings):
    truth = trained(1, Alone(), WINDOW, f"batch.size={SIZE * DOCUMENTS}")[0]
    check_packed(ranks, [*settings, WINDOW], truth)


def check_packed(ranks, settings, truth):
    found = trained(ranks, Packed(), *CUT, *settings)
    steps, evaluated, tensors = truth
    for own, own_evaluated, own_tensors in found:
        assert np.abs(np.subtract(own, steps)).max() <= 1e-12
        assert np.abs(np.subtract(own_evaluated, evaluated)).max() <= 1e-12
        for name, tensor in own_tensors.items():
            if tensor.shape == tensors[name].shape:
                assert np.abs(tensor - tensors[name]).max() <= 1e-12, name
    if not settings and ranks == 1:
        crossing = trained(1, Unmarked())[0][0]
        assert np.abs(np.subtract(crossing, steps)).max() > 1e-3


class Unmarked(Packed):
    """The same rows without borders."""

    def batch(self, *given, before=None):
        inputs, targets = super().batch(*given)
        return inputs, np.where(targets == DOCUMENT_END, IGNORED, targets)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_asynchronous_pipeline_cuts_at_its_own_documents(ranks):
    """The first update of 2BW is that of a plain step."""
    common = ["optimizer.clip=0.0", "run.steps=1"]
    steps, _, tensors = trained(1, Alone(), *common, f"batch.size={SIZE * DOCUMENTS}", steps=1)[0]
    layout = ["batch.micro_batches=2", f"layout.pp={ranks}", "pipeline.schedule=async-2bw"]
    for own, _, own_tensors in trained(ranks, Packed(), *CUT, *common, *layout, steps=1):
        assert abs(own[0][0] - steps[0][0]) <= 1e-12
        for name, tensor in own_tensors.items():
            assert np.abs(tensor - tensors[name]).max() <= 1e-12, name


@pytest.mark.parametrize(
    "ranks, settings",
    [
        (1, []),
        (2, ["layout.tp=2"]),
        (2, ["layout.pp=2", "batch.micro_batches=2"]),
        (2, ["layout.cp=2"]),
        (4, ["layout.cp=4", "layout.cp_mode=ring"]),
    ],
    ids=str,
)
@pytest.mark.compile
def test_the_simulator_trains_on_documents_as_the_host(ranks, settings):
    common = [*CUT, *settings, "precision.compute=float32"]
    host, simulated = (
        trained(ranks, Packed(), *common, f"device.kind={kind}", steps=2)
        for kind in ("cpu", "cuda-sim")
    )
    for own, other in zip(host, simulated, strict=True):
        assert np.abs(np.subtract(own[0], other[0])).max() <= 1e-5
        for name, tensor in own[2].items():
            assert np.abs(tensor - other[2][name]).max() <= 1e-5, name


@pytest.mark.parametrize("window", [[], [WINDOW]], ids=str)
def test_dropout_within_documents_is_the_same_in_any_layout(window):
    common = [*CUT, "model.attention_dropout=0.3", *window]
    one = trained(1, Packed(), *common)[0][0]
    for ranks, settings in (
        (2, []),
        (2, ["layout.tp=2"]),
        (2, ["layout.pp=2"]),
        (2, ["layout.cp=2"]),
    ):
        other = trained(ranks, Packed(), *common, *settings)[0][0]
        assert np.abs(np.subtract(one, other)).max() <= 1e-12


def test_an_end_of_a_document_is_no_target_of_windows():
    with pytest.raises(DataError, match="-101 at"):
        trained(1, Packed())


def test_documents_need_a_separator_or_packing():
    with pytest.raises(
        ConfigError, match=r"attend=document needs documents(.|\n)*data.packing=true"
    ):
        configured("data.attend=document")
    with pytest.raises(ConfigError, match=r"data\.attend is of data\.source"):
        open_source("digits", T, "float32", reading=Reading(attend="document"))


@pytest.mark.parametrize("ranks, settings", [(1, CUT), (2, ["layout.cp=2"])])
def test_documents_and_layout_cp_need_attention_of_the_layer_factory(ranks, settings):
    def go(transport):
        config = configured(*MASKED, *settings)
        layers = Plain(device_for("cpu").ops)
        Trainer(
            transport,
            [Unit("one", layers.norm(4)), Unit("two", layers.linear(4, 4, zeros))],
            config,
        )

    with pytest.raises(ConfigError, match=f"{settings[0]} needs the layer"):
        run_ranks(ranks, go)


def test_a_packed_run_learns_in_any_layout_and_resumes(tmp_path):
    lines = [{"prompt": f"{n}+1", "answer": f"{n + 1}"} for n in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = [
        *TINY,
        f"data.source=jsonl:{tmp_path / 'data.jsonl'}",
        "data.packing=true",
        "data.attend=document",
        "model.context=64",
        "precision.compute=float64",
    ]
    found = []
    for ranks, settings in ((1, []), (2, []), (2, ["layout.pp=2"]), (1, ["run.steps=3"])):
        folder = tmp_path / f"{len(found)}"
        go(ranks, [*common, *settings, f"run.out={folder}/run"])
        if "run.steps=3" in settings:
            go(2, [*common, f"run.out={folder}/run"], resume="auto")
        found.append([line["loss"] for line in records(folder) if "loss" in line])
    assert len(found[0]) == 6 and found[0][-1] < found[0][0]
    for other in found[1:]:
        assert np.abs(np.subtract(found[0], other)).max() <= 1e-12


@pytest.mark.parametrize(
    "own, other",
    [
        (["data.source=jsonl:DATA", "data.packing=true"], "pydocs"),
        (["data.separator=10", "data.order=epochs"], "jsonl:DATA"),
        (["data.source=mixture", 'data.mixture={"pydocs"=1}', "data.separator=10"], "pydocs"),
    ],
    ids=str,
)
def test_a_run_is_evaluated_on_a_source_of_another_kind(own, other, tmp_path):
    """Keys of the run that the other source does not read are left out."""
    line = json.dumps({"prompt": "2", "answer": "3"})
    (tmp_path / "data.jsonl").write_text(f"{line}\n" * 20)
    own, other = (
        json.loads(json.dumps(one).replace("DATA", str(tmp_path / "data.jsonl")))
        for one in (own, other)
    )
    common = [*TINY, "data.attend=document", "model.context=24", "run.steps=1", "run.eval_rows=4"]
    go(1, [*common, *own, f"run.out={tmp_path}/run"])
    for settings in ([], [f"data.source={other}"]):
        opened = partial(reopened, tmp_path / "run", settings)
        job = run_ranks(1, open_run, tmp_path / "run", opened)[0]
        assert np.isfinite(job.trainer.evaluate(job.data)[0])
