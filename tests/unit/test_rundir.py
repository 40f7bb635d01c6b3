"""The directory of a run: what is in it is checked before it is believed, and it can be anywhere."""

import json

import pytest

from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.rundir import configuration
from mpitrain.session import train
from mpitrain.transport.threads import run_ranks

TINY = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "batch.size=4", "run.steps=3",
        "run.log_every=1", "run.eval_every=-1", "device.kind=cpu"]


class Silent:
    """Watches without a word."""

    def began(self, config, folder, record):
        pass

    def stepped(self, step, loss):
        pass

    def recorded(self, record):
        pass


def trained(folder, *settings, resume="no", ranks=1, base=TINY):
    """Train in a directory; the losses of its metrics by step."""
    tables = configuration(folder).model_dump() if resume == "yes" else {}
    config = parse(with_settings({**tables, "layout": {}}, [*([] if tables else base), *settings, f'run.out="{folder}"']))
    run_ranks(ranks, train, config, resume, lambda: False, Silent())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["loss"] for r in map(json.loads, lines) if "loss" in r}


@pytest.fixture
def folder(tmp_path):
    """A run of three steps."""
    trained(tmp_path / "run")
    return tmp_path / "run"


def test_data_below_a_folder_whose_name_is_not_utf_8_are_refused(tmp_path, monkeypatch):
    (tmp_path / "\udcff").mkdir()
    (tmp_path / "\udcff/book").write_bytes(bytes(1000))
    monkeypatch.chdir(tmp_path / "\udcff")
    with pytest.raises(ConfigError, match=r"data.source must be UTF-8, but is 'text:.*\\udcff/book'"):
        trained(tmp_path / "run", "data.source=text:book")


@pytest.mark.parametrize("damage, complaint", [
    (lambda text: "", "lacks run.seed, run.steps, .* and [0-9]+ more"),
    (lambda text: text[:text.index("[model]")], r"lacks model.kind, model.layers"),
    (lambda text: text.replace("width = 16\n", ""), r"lacks model.width\."),
    (lambda text: text[:text.index("context = ") + 8], "is not TOML"),
])
def test_a_configuration_that_does_not_say_everything_is_refused(folder, damage, complaint):
    path = folder / "config.toml"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=complaint):
        configuration(folder)
    config = parse(with_settings({}, [*TINY, f'run.out="{folder}"', "run.steps=4"]))
    with pytest.raises(ConfigError, match=complaint):
        run_ranks(2, train, config, "yes", lambda: False, Silent())
