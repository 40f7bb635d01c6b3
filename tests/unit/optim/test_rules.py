"""Rows of the table of update rules: what they read and hold, and what [optimizer] may say with each."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import mpitrain
from mpitrain.config import Optimizer, parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.layers.base import Parameter
from mpitrain.layers.flat import GRAIN, FlatLayout
from mpitrain.ops import OPERATIONS
from mpitrain.optim import RULES
from mpitrain.optim.coded import BlockWise
from mpitrain.optim.optimizer import EVERY, ElementWise, columns, elements, rows, scalar
from mpitrain.optim.tensors import TensorWise, blocks
from mpitrain.run import rules
from mpitrain.run.choices import parse as parse_names
from mpitrain.run.job import with_hyper_parameters
from mpitrain.run.run_dir import configuration, look
from tests.cases.rules import TOYS
from tests.unit.run.test_run_dir import TINY, trained


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    for name, rule in TOYS.items():
        monkeypatch.setitem(RULES, name, rule)


def config_of(*settings):
    return parse(with_settings({}, list(settings)))


def optimizer_of(*settings):
    config = config_of(*settings)
    rules.check_each(rules.of_optimizer(config))
    return with_hyper_parameters(config).optimizer


@pytest.mark.parametrize("name", [*RULES, *TOYS])
def test_a_row_names_keys_operations_and_shapes_that_exist(name):
    rule, matrix = RULES[name], Parameter("matrix", (3, 5), None, True)
    assert rule.help and not rule.help.endswith(".")
    assert {*rule.reads} <= {*Optimizer.model_fields} - {*EVERY}
    assert {*rule.defaults} <= {*rule.reads, "lr"}
    shapes = ((3, 5), (3,), (5,), (), None)
    assert all(shape(matrix) in shapes for shape in rule.state.values())
    if isinstance(rule.step, ElementWise | BlockWise):
        assert rule.step.op in OPERATIONS
        assert {*rule.state.values()} <= {elements}, "an element has no state of other elements"
    else:
        assert isinstance(rule.step, TensorWise) and callable(rule.step.apply)


def test_memory_estimates_know_the_state_of_a_parameter():
    found = {name: rule.nbytes(4) for name, rule in RULES.items()}
    moments = {"momentum": 1, "nesterov": 1, "adam": 2, "adamw": 2, "lion": 1, "muon": 1}
    moments |= {"lamb": 2, "adafactor": 0}
    wanted = {"sgd": 0, "adamw8bit": 2 + 8 / 256, **{name: 4 * n for name, n in moments.items()}}
    assert wanted.items() <= found.items()
    assert RULES["normalised"].nbytes(8) == 0


LAYOUTS = {
    "dp": [],
    "tp": ["layout.tp=2"],
    "pp": ["layout.pp=2"],
    "dp x tp x pp": ["layout.dp=2", "layout.tp=2", "layout.pp=2"],
    **{f"ZeRO-{stage}": [f"replication.zero={stage}"] for stage in (1, 2, 3)},
    "master": ["replication.mode=master"],
    "server": ["replication.mode=server"],
}


def runs(name, settings):
    """Whether the rule and the mode accept this configuration."""
    config = config_of(f"optimizer.name={name}", *settings)
    return not any(rule[0] for of in (rules.of_optimizer, rules.of_modes) for rule in of(config))


def test_the_page_says_which_rules_run_in_which_layouts_with_what_state():
    page = (Path(mpitrain.__file__).parent / "optim/README.md").read_text()
    assert f"| `optimizer.name` | state | {' | '.join(LAYOUTS)} |" in page
    for name in (name for name in RULES if name not in TOYS):
        cells = [f"{RULES[name].nbytes(4):.3g}"]
        cells += ["runs" if runs(name, settings) else "refused" for settings in LAYOUTS.values()]
        assert f"| `{name}` | {' | '.join(cells)} |" in page, name
    assert not runs("muon", LAYOUTS["tp"]) and runs("lamb", LAYOUTS["tp"])


def test_other_buffers_of_the_state_count_in_the_estimate_of_memory():
    tensors = [Parameter("w", (3, 5), None, True), Parameter("b", (7,), None, False)]
    layout = FlatLayout([tensors], np.dtype(np.float32), GRAIN)

    def others(rule):
        return rule.step.optimizer.state_bytes(rule, layout) - rule.nbytes(4) * layout.length

    found = {name: others(RULES[name]) for name in ("adamw", "adafactor", "muon")}
    assert found == {"adamw": 0, "adafactor": 4 * (3 + 5 + 7), "muon": 4 * 7}


@pytest.mark.parametrize(
    "settings, read, ways",
    [
        (("name=adamw", "momentum=0.5"), "beta1", "momentum"),
        (("name=sgd", "momentum=0.5"), "weight_decay", "momentum"),
        (("name=momentum", "beta1_delayed=0.1"), "momentum", "adamw"),
        (("name=sgd", "epsilon=0.1"), "weight_decay", "normalised"),
    ],
)
def test_an_unused_optimizer_key_is_refused_with_the_used_ones(settings, read, ways):
    with pytest.raises(ConfigError) as raised:
        optimizer_of(*(f"optimizer.{setting}" for setting in settings))
    assert f"but optimizer.{settings[1].replace('=', ' is ')}." in raised.value.law
    assert read in raised.value.law and re.search(rf"name to .*\b{ways}\b", raised.value.way_out)


def test_all_keys_that_the_rule_does_not_read_are_named_at_once():
    with pytest.raises(ConfigError, match=r"0\.3 and \S+beta1 is 0\.5"):
        optimizer_of("optimizer.name=sgd", "optimizer.momentum=0.3", "optimizer.beta1=0.5")


def test_a_key_at_its_default_is_not_set():
    everything = parse({}).model_dump()
    everything["optimizer"]["name"] = "sgd"
    assert with_hyper_parameters(parse(everything)).model_dump() == everything


def test_a_rules_defaults_can_be_overridden_and_are_saved():
    own = "optimizer.name=normalised"
    found = with_hyper_parameters(config_of(own))
    assert found.optimizer.epsilon == 1e-7 and parse({}).optimizer.epsilon == 1e-8
    assert optimizer_of(own, "optimizer.epsilon=1e-8").epsilon == 1e-8
    assert with_hyper_parameters(parse(found.model_dump())) == found


def test_a_name_that_is_no_rule_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'sgd', .* mean lion\?"):
        parse_names({"optimizer": {"name": "lyon"}})


def test_a_rule_of_an_operation_that_is_not_there_is_refused(monkeypatch):
    rule = RULES["sgd"]._replace(step=ElementWise("missing", lambda update: {}))
    monkeypatch.setitem(RULES, "toy", rule)
    with pytest.raises(ConfigError, match="missing"):
        optimizer_of("optimizer.name=toy")


@pytest.mark.parametrize("kind", ["cuda", "cuda-sim"])
def test_a_rule_without_kernels_is_refused_when_it_is_read(kind, monkeypatch):
    monkeypatch.setitem(OPERATIONS, "slow", OPERATIONS["sgd"]._replace(file=""))
    rule = RULES["sgd"]._replace(step=ElementWise("slow", lambda update: {}))
    monkeypatch.setitem(RULES, "toy", rule)
    assert parse_names({"optimizer.name": "toy", "device.kind": "cpu"})
    with pytest.raises(ConfigError, match="the operation `slow` has none"):
        parse_names({"optimizer.name": "toy", "device.kind": kind})


def test_a_rule_refuses_the_keys_that_it_cannot_run_with():
    assert optimizer_of("optimizer.name=whole").name == "whole"
    with pytest.raises(ConfigError, match=r"whole needs layout\.tp 1, but it is 2\."):
        optimizer_of("optimizer.name=whole", "layout.tp=2")


def test_an_old_run_with_dropped_keys_opens(tmp_path):
    folder = tmp_path / "run"
    trained(folder, "optimizer.name=sgd")
    text = (folder / "config.toml").read_text()
    assert "\nmomentum = 0.9\n" in text and "\nbeta2 = 0.95\n" in text, "all keys are listed"
    config = config_of(*TINY, "optimizer.name=sgd", f'run.out="{folder}"')
    assert look(config, "yes", 1)["changed"] == {}
    (folder / "config.toml").write_text(text.replace("momentum = 0.9\n", "momentum = 0.5\n"))
    assert configuration(folder).optimizer.momentum == 0.9
    assert look(config, "yes", 1)["changed"] == {}
    assert len(trained(folder, "run.steps=4", resume="yes")) == 4


QKV = tuple((slice(start, start + 2), slice(0, 5)) for start in (0, 4, 8))
REGIONS = {
    "whole": ((7, 5), None),
    "three rectangles": ((12, 5), QKV),
    "columns": ((7, 6), ((slice(0, 7), slice(3, 6)),)),
    "vector": ((11,), None),
    "part of a vector": ((11,), ((slice(2, 9),),)),
    "scalar": ((), None),
    "three dims": ((3, 2, 4), None),
    "one column": ((4, 1), None),
    "no row": ((0, 4), None),
}


@pytest.mark.parametrize("region", REGIONS)
def test_blocks_cover_a_piece_with_rows_and_columns_of_its_tensor(region):
    shape, slices = REGIONS[region]
    tensor = Parameter("tensor", shape, None, True, slices)
    whole = np.arange(float(np.prod(shape))).reshape(shape)
    local, width = tensor.part_of(whole).reshape(-1), (*shape, 1)[len(shape) - 1] if shape else 1
    for start in range(len(local) + 1):
        for stop in range(start, len(local) + 1):
            found = blocks(tensor, start, stop)
            values = [
                (block.rows[:, None] * width + block.columns).reshape(-1).astype(float)
                for block in found
            ]
            assert len(found) <= 3
            assert np.array_equal(np.concatenate([[], *values]), local[start:stop])
            ends = [0, *(block.stop for block in found)]
            assert [block.start for block in found] == ends[:-1] and ends[-1] == stop - start


def test_shapes_of_sums_leave_out_dims():
    for shape, by_row, by_column in (((3, 5), (3,), (5,)), ((4,), (), (4,)), ((), (), ())):
        tensor = Parameter("tensor", shape, None, True)
        found = [kind(tensor) for kind in (elements, rows, columns, scalar)]
        assert found == [shape, by_row, by_column, ()]


def test_the_job_that_compares_rules_prints_a_row_for_each(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "jobs/prove"))
    job = importlib.import_module("rules")
    small = ["run.steps=2", "model.layers=1", "model.width=16", "model.heads=2", "run.eval_rows=4"]
    settings = [word for setting in (*small, "batch.size=2") for word in ("--set", setting)]
    monkeypatch.setattr("sys.argv", ["rules", "lion", "adamw8bit", "sgd", *settings])
    job.main()
    rows = re.findall(
        r"^\| `(\w+)` \| [\d.]+ \| \(?[\d.e-]+\)? \| ([\d.]+) \| \d+ \|$",
        capsys.readouterr().out,
        re.M,
    )
    assert [name for name, _ in rows] == ["lion", "adamw8bit", "sgd"]
    assert 8 <= float(rows[2][1]) < float(rows[0][1]) < 13


def test_the_page_describes_each_rule_that_it_names_and_its_bytes():
    page = (Path(mpitrain.__file__).parent / "optim/README.md").read_text()
    described = re.findall(r"^\| `(\w+)` \| [^|]+ \|[^|]*\|$", page, re.M)
    measured = dict(
        re.findall(r"^\| `(\w+)` \| [\d.]+ \| \(?[\d.]+\)? \| ([\d.]+) \| \d+ \|$", page, re.M)
    )
    house = {name for name, rule in RULES.items() if name not in TOYS}
    for name in house:
        assert name in described, f"optim/README.md describes no update of {name}"
        assert name in measured, (
            f"optim/README.md has no measurement of {name}: `python jobs/prove/rules.py {name}` prints its row"
        )
    assert {*described} == {*measured} == house
    for name, nbytes in measured.items():
        assert 0 <= float(nbytes) - 8 - RULES[name].nbytes(4) < 0.5, name
