"""A row in MODELS and a row in SOURCES are a complete model and a complete data source."""

from functools import partial
from itertools import islice

import numpy as np
import pytest

from mpitrain.config import with_settings
from mpitrain.data import SOURCES, SourceKind
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Unit, normal
from mpitrain.models.table import MODELS, Model
from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as reopened
from mpitrain.run.choices import parse
from mpitrain.run.loop import train
from mpitrain.transport.threads import run_ranks
from tests.generation import tokens

V = 7


class Counting:
    """A source of tokens, or of images: row r of a step counts upwards from its own start."""

    def __init__(self, request, form="tokens"):
        self.form = form
        self.shape = (request.context,) if form == "tokens" else (2, 3, 4)
        self.inputs, self.classes = V if form == "tokens" else 24, V
        self.held_out, self.dtype = 6, request.dtype

    def batch(self, seed, step, size, rows, before=None):
        starts = np.random.default_rng([seed, step]).integers(V, size=size)[rows.start : rows.stop]
        return self.rows(starts)

    def rows(self, starts):
        if self.form == "images":
            pixels = np.zeros((len(starts), *self.shape), self.dtype)
            pixels[:, 0, 0, 0] = starts - V // 2
            return pixels, starts.astype(np.int64)
        counted = (starts[:, None] + np.arange(self.shape[0] + 1)) % V
        return counted[:, :-1], counted[:, 1:]

    def held_out_rows(self, rows):
        return self.rows(np.asarray(rows) % V)


class Flat:
    """A layer without parameters: images (B, C, H, W) -> (B, C H W)."""

    output_is_free = False

    def parameters(self):
        return []

    def forward(self, w, x, now, arena):
        return x.reshape(len(x), -1), x.shape

    def backward_input(self, w, dy, saved, arena):
        return dy.reshape(saved), None

    def backward_weight(self, pending, dw, arena):
        pass

    def output_shape(self, shape):
        return shape[0], int(np.prod(shape[1:]))


def bigrams(layers, keys, source):
    return [
        Unit("embedding", layers.embedding(source.inputs, keys.context, keys.width)),
        Unit("head", layers.head(keys.width, source.classes, normal(0.1))),
    ]


def picture(layers, keys, source):
    assert source.shape == (2, 3, 4), "the shape of an image reaches the model"
    return [
        Unit("flat", Flat()),
        Unit("head", layers.linear(source.inputs, source.classes, normal(0.1))),
    ]


def even(keys):
    if keys.width % 2:
        raise ConfigError(f"A bigram has an even width, but it is {keys.width}.")


@pytest.fixture(autouse=True)
def rows(monkeypatch):
    """Toy rows, as a plugin adds them at start-up."""
    bigram = Model(bigrams, "tokens", "of pairs", split="width", check=even, writes=True)
    monkeypatch.setitem(MODELS, "bigram", bigram)
    monkeypatch.setitem(MODELS, "picture", Model(picture, "images", "for images", split="width"))
    monkeypatch.setitem(SOURCES, "count", SourceKind(Counting, "tokens", ":WORD"))
    images = SourceKind(lambda request: Counting(request, "images"), "images")
    monkeypatch.setitem(SOURCES, "marks", images)


def configured(*settings):
    usual = [
        "model.width=8",
        "model.context=4",
        "batch.size=6",
        "optimizer.lr=0.05",
        "run.steps=30",
    ]
    quiet = ["optimizer.warmup=0", "optimizer.weight_decay=0", "device.kind=cpu", "run.log_every=1"]
    return parse(with_settings({}, [*usual, *quiet, *settings]))


def trained(config, resume="no"):
    return run_ranks(2, lambda transport: train(transport, lambda: config, resume, lambda: False))


def test_a_toy_model_and_source_work_on_two_replicas(tmp_path):
    settings = ["data.source=count:up", "model.kind=bigram", f"run.out={tmp_path / 'run'}"]
    trained(configured(*settings, "run.steps=20"))
    trained(configured(*settings), "yes")
    text = (tmp_path / "run/config.toml").read_text()
    assert f"vocabulary = {V}\n" in text and 'kind = "bigram"' in text
    last = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert '"tokens_per_s"' in "".join(last) and '"replicas_equal": true' in last[-1]

    def opened(transport):
        alone = partial(reopened, tmp_path / "run", [])
        job = open_run(transport, tmp_path / "run", alone)
        unread = open_run(transport, tmp_path / "run", alone, needs_data=False).trainer
        return job.trainer.evaluate(job.data), list(islice(tokens(unread, [5], 0, 0, 0), 4))

    (found, written), *others = run_ranks(2, opened)
    assert found[1] == 1 and others == [(found, written)]
    assert written == [6, 0, 1, 2], "each token is the one before, plus 1"


@pytest.mark.parametrize("settings", [[], ["precision.compute=bfloat16"], ["layout.pp=2"]])
def test_images_keep_their_shape_up_to_the_model_that_takes_them(settings, tmp_path):
    more = [f"run.out={tmp_path / 'run'}", "layout.dp=0", "pipeline.partition=time"]
    assert configured("data.source=marks").model.kind == "cnn", "the first that fits the source"
    config = configured("data.source=marks", "model.kind=picture", *more, *settings)
    for finished in trained(config):
        assert finished.job.trainer.parameter_count == 24 * V + V
        last = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert '"replicas_equal": true' in last[-1]


@pytest.mark.parametrize(
    "source, kind, law",
    [
        (
            "count:up",
            "mlp",
            "The model.kind for count:up is gpt or llama or bert or bigram, but the configuration says mlp.",
        ),
        (
            "marks",
            "bigram",
            "The model.kind for marks is cnn or picture, but the configuration says bigram.",
        ),
        (
            "digits",
            "bigram",
            "The model.kind for digits is mlp or cnn or picture, but the configuration says bigram.",
        ),
    ],
)
def test_a_model_with_data_of_another_form_is_refused_on_every_rank(source, kind, law):
    if source == "digits":
        pytest.importorskip("sklearn")

    def refused(transport):
        with pytest.raises(ConfigError) as error:
            build(transport, configured(f"data.source={source}", f"model.kind={kind}"))
        return error.value.law, error.value.agreed

    assert run_ranks(2, refused) == [(law, True)] * 2


def test_a_source_that_a_program_passes_is_refused_by_its_form_as_well(monkeypatch):
    for kind in ("picture", "cnn"):
        monkeypatch.delitem(MODELS, kind)
    marks = SOURCES["marks"].open
    config = configured("model.kind=mlp")

    def refused(transport):
        request = type("R", (), {"context": 4, "dtype": "float32"})
        with pytest.raises(ConfigError, match="has images, which"):
            build(transport, config, source=marks(request))
        return transport.traffic.messages

    assert run_ranks(2, refused) == [0, 0]


@pytest.mark.parametrize(
    "settings, law",
    [
        (
            ["model.kind=trigram"],
            "'gpt', 'llama', 'bert', 'mlp', 'cnn', 'bigram' or 'picture', but is",
        ),
        (["model.kind=bigrams"], "did you mean bigram?"),
        (["model.kind=bigram", "model.width=7"], "A bigram has an even width, but it is 7."),
        (
            ["model.kind=bigram", "model.width=6", "layout.tp=4"],
            "layout.tp must divide model.width",
        ),
        (
            ["layout.tp=2", "layout.sequence_parallel=true", "model.kind=picture"],
            "model.kind is pi",
        ),
    ],
)
def test_the_rules_of_a_row_are_those_of_its_configuration(settings, law):
    with pytest.raises(ConfigError) as error:
        configured(*settings)
    assert law in error.value.law
