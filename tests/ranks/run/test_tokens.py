"""Files of tokens: the ranks share one scan, a run makes it once, and a vocabulary too small is refused before it begins."""

import json
import os

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.data import largest_token
from mpitrain.errors import DataError
from mpitrain.run import build as build_module
from mpitrain.run.build import build, configured, open_run
from mpitrain.transport.threads import run_ranks
from tests.runs import TINY, go


@pytest.fixture
def scans(monkeypatch):
    """The parts of files that were scanned."""
    seen = []

    def recorded(name, part, parts, dtype):
        seen.append((part, parts))
        return largest_token(name, part, parts, dtype)

    monkeypatch.setattr(build_module, "largest_token", recorded)
    return seen


@pytest.fixture
def settings(tmp_path):
    """Settings of a run on 3000 tokens, the largest of which, 901, is seen by the last rank alone and hardly ever drawn."""
    tokens = np.arange(3000) % 50
    tokens[2990] = 901
    tokens.astype("<u2").tofile(tmp_path / "tokens")
    return [*TINY, f"data.source=tokens:{tmp_path / 'tokens'}", f"run.out={tmp_path / 'run'}"]


def test_each_rank_scans_its_tokens_once_per_version_of_the_file(settings, scans, tmp_path):
    go(3, [*settings, "run.steps=2"])
    assert sorted(scans) == [(0, 3), (1, 3), (2, 3)]
    assert json.loads((tmp_path / "run/tokens.json").read_text())["largest"] == 901
    scans.clear()
    go(2, [*settings, "run.steps=4"], "yes")
    job = run_ranks(
        2,
        lambda transport: open_run(
            transport, tmp_path / "run", lambda: configured(tmp_path / "run", [])
        ),
    )[0]
    assert scans == [] and job.source.inputs == 902
    os.utime(tmp_path / "tokens", ns=(1, 1))
    go(2, [*settings, "run.steps=6"], "yes")
    assert sorted(scans) == [(0, 2), (1, 2)]
    scans.clear()
    (tmp_path / "run/tokens.json").write_text("{")
    go(2, [*settings, "run.steps=8"], "yes")
    assert sorted(scans) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("ranks", (1, 3))
def test_a_vocabulary_too_small_is_refused_on_every_rank_before_training(ranks, settings, tmp_path):
    config = parse(with_settings({}, [*settings, "data.vocabulary=901"]))

    def refused(transport):
        with pytest.raises(DataError, match=r"901, so data\.vocabulary") as error:
            build(transport, config)
        return error.value.exit_code, error.value.agreed

    assert run_ranks(ranks, refused) == [(2, True)] * ranks
    assert not (tmp_path / "run").exists()
