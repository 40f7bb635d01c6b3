"""A mixture draws each row from one of its sources by weight, in any layout the same."""

import itertools

import numpy as np
import pytest

from mpitrain.config import with_settings
from mpitrain.data import Reading, open_source
from mpitrain.errors import ConfigError, DataError
from mpitrain.run.choices import parse
from tests.runs import TINY, go, records

WEIGHTS = (6, 3, 1)


@pytest.fixture
def names(tmp_path):
    """Three sources; source n has the tokens 100 n .. 100 n + 99."""
    for number in range(3):
        tokens = 100 * number + np.arange(1000 + 500 * number) % 100
        tokens.astype("<u2").tofile(tmp_path / f"{number}.bin")
    return [f"tokens:{tmp_path}/{number}.bin" for number in range(3)]


def opened(names, weights=WEIGHTS, **reading):
    members = dict(zip(names, weights, strict=False))
    reading = Reading()._replace(mixture=members, **reading)
    return open_source("mixture", 8, "float32", reading=reading)


def test_rows_come_from_the_sources_by_their_weights(names):
    source = opened(names)
    rows = [source.batch(0, step, 500, range(500))[0][:, 0] // 100 for step in range(20)]
    counts = np.bincount(np.concatenate(rows), minlength=3)
    expected = 10_000 * np.array(WEIGHTS) / 10
    assert (np.abs(counts - expected) < 4 * np.sqrt(expected)).all()
    assert source.inputs == 300


def test_a_row_lies_within_one_source_and_its_targets_follow(names):
    inputs, targets = opened(names).batch(0, 0, 200, range(200))
    assert (inputs // 100 == inputs[:, :1] // 100).all()
    assert np.array_equal(targets[:, :-1], inputs[:, 1:])


@pytest.mark.parametrize("ranks", (2, 3, 5))
def test_any_number_of_ranks_draws_the_same_batch(names, ranks):
    source = opened(names)
    whole = source.batch(3, 7, 11, range(11))
    cuts = [11 * rank // ranks for rank in range(ranks + 1)]
    parts = [source.batch(3, 7, 11, range(*cut)) for cut in itertools.pairwise(cuts)]
    for one, *pieces in zip(whole, *parts, strict=True):
        assert np.array_equal(np.concatenate(pieces), one)


def test_held_out_rows_are_those_of_each_source(names):
    source, members = opened(names), [open_source(name, 8, "float32") for name in names]
    assert source.held_out == sum(member.held_out for member in members)
    rows = [member.held_out_rows(range(member.held_out))[0] for member in members]
    order = np.random.default_rng(0).permutation(source.held_out)
    assert np.array_equal(source.held_out_rows(order)[0], np.concatenate(rows)[order])


def test_a_separator_is_one_of_every_source(names):
    assert (opened(names, separator=5).batch(0, 0, 99, range(99))[1] == -100).any()
    with pytest.raises(DataError, match=r"data\.separator"):
        opened(names, separator=150)


@pytest.mark.parametrize(
    "settings, said",
    [
        (["data.source=mixture"], "data.mixture has 0"),
        (["data.source=mixture", 'data.mixture={"pydocs": 0}'], "above 0"),
        (["data.source=mixture", 'data.mixture={"pydocs": 1'], "data.mixture"),
        (['data.mixture={"pydocs"=1}'], "data.source is pydocs"),
        (["data.source=mixture", 'data.mixture={"digits"=1}'], "'digits'"),
        (["data.source=mixture", 'data.mixture={"jsonl:x"=1}'], "'jsonl:x'"),
        (["data.source=mixture", 'data.mixture={"mixture"=1}'], "'mixture'"),
        (["data.source=mixture", 'data.mixture={"pydocs"=0}'], "above 0"),
        (["data.source=mixture", 'data.mixture={"pydocs"=-1.5}'], "above 0"),
        (["data.source=mixture", 'data.mixture={"pydocs"="a"}'], "data.mixture"),
        (["data.source=mixture", 'data.mixture={"pydocs"=true}'], "data.mixture"),
        (["data.source=mixture", "data.mixture=3"], "data.mixture"),
    ],
)
def test_a_wrong_mixture_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        parse(with_settings({}, settings))


def test_a_mixture_with_text_has_at_least_its_vocabulary(tmp_path):
    (tmp_path / "t").write_bytes(b"a" * 500)
    mixed = Reading()._replace(mixture={"pydocs": 1.0, f"text:{tmp_path}/t": 2.0})
    assert open_source("mixture", 8, "float32", 300, reading=mixed).inputs == 300
    with pytest.raises(ConfigError, match="256, but is 255"):
        open_source("mixture", 8, "float32", 255, reading=mixed)


def test_one_source_under_two_names_is_refused(tmp_path):
    """The run directory stores one absolute path, so one of the weights would be lost."""
    (tmp_path / "loop").symlink_to("loop")
    parse(with_settings({}, ["data.source=mixture", f'data.mixture={{"text:{tmp_path}/loop"=1}}']))
    table = f'{{"text:{tmp_path}/a"=1, "text:{tmp_path}/../{tmp_path.name}/a"=2}}'
    with pytest.raises(ConfigError, match="one twice"):
        parse(with_settings({}, ["data.source=mixture", f"data.mixture={table}"]))


def test_epochs_of_a_mixture_are_refused(names):
    with pytest.raises(ConfigError, match=r"data\.order"):
        opened(names, order="epochs")


def test_a_run_with_a_mixture_goes_on_where_it_stopped(tmp_path, names):
    """Its file has the mixture with absolute paths."""
    table = ", ".join(f'"{name}"={weight}' for name, weight in zip(names, WEIGHTS, strict=True))
    settings = [*TINY, "data.source=mixture", f"data.mixture={{{table}}}", "run.sample=0"]
    found = []
    for folder in ("whole", "halves"):
        out = tmp_path / folder / "run"
        if folder == "halves":
            go(2, [*settings, f"run.out={out}", "run.steps=3"])
        go(1, [*settings, f"run.out={out}"], resume="auto")
        found.append([line["loss"] for line in records(out.parent) if "loss" in line])
    assert np.allclose(*found, rtol=1e-5)
