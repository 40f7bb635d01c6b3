"""Plugins: imported once, in order, and refused with file, line and rank; tables that nothing overwrites."""

import hashlib
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.config import Config, Run, parse, plugins, read_toml
from mpitrain.errors import ConfigError
from mpitrain.run import choices
from mpitrain.run.job import agree_on
from mpitrain.run.run_dir import configuration
from mpitrain.tables import Table
from mpitrain.transport.threads import run_ranks
from tests.rows import added_rows


@pytest.fixture(autouse=True)
def alone():
    with added_rows():
        yield


def written(folder, text, name="mine.py"):
    (folder / name).write_text(text)
    return str(folder / name)


def named(*paths):
    return choices.parse({"run": {"plugins": [*map(str, paths)]}})


def refusal(*paths):
    with pytest.raises(ConfigError) as raised:
        named(*paths)
    assert raised.value.exit_code == 2 and raised.value.way_out
    return raised.value.law


def test_a_table_takes_a_new_name_once():
    table = Table({"one": 1})
    table["two"] = 2
    for name in table:
        with pytest.raises(ConfigError, match=f"'{name}' is there"):
            table[name] = 3
    for add in (table.update, table.__ior__):
        with pytest.raises(ConfigError, match="'one'"):
            add({"one": 3})
    assert table == {"one": 1, "two": 2}
    table.update(three=3)
    table |= {"four": 4}
    assert {*table} == {"one", "two", "three", "four"}
    del table["two"]
    table["two"] = 4


def test_no_way_to_fill_a_dict_replaces_a_row():
    table = Table({"one": 1})
    ways = [
        lambda rows: table.update(rows),
        lambda rows: table.update(**rows),
        lambda rows: table.update(rows.items()),
        lambda rows: table.__ior__(rows),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match="'one' is there"):
            way({"one": 2})
    assert table == {"one": 1} and table.setdefault("one", 2) == 1
    table.update(two=2)
    table |= {"three": 3}
    assert table.setdefault("four", 4) == 4
    assert type(table) is Table and [*table.values()] == [1, 2, 3, 4]


def test_a_row_of_another_type_than_the_others_is_refused():
    table = Table({"one": 1})
    for add in (lambda: table.update(two="2"), lambda: table.setdefault("two", "2")):
        with pytest.raises(ConfigError, match=r"int, .* type str"):
            add()


def test_plugins_are_imported_once_in_order_with_their_digests(tmp_path):
    log = tmp_path / "log"
    paths = [
        written(tmp_path, f"open({str(log)!r}, 'a').write('{name} ')\n", f"{name}.py")
        for name in ("b", "a")
    ]
    digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
    pinned = [f"{path} sha256:{digest}" for path, digest in zip(paths, digests, strict=True)]
    for given in (paths, pinned, paths):
        assert named(*given).run.plugins == pinned
    found = run_ranks(3, lambda transport: named(*paths).run.plugins)
    assert found == [pinned] * 3 and log.read_text() == "b a "


def test_paths_in_a_file_are_relative_to_its_folder(tmp_path):
    written(tmp_path, "")
    (tmp_path / "run.toml").write_text('run.plugins = ["mine.py"]\n')
    tables = read_toml(tmp_path / "run.toml")
    assert tables["run"]["plugins"] == [str(tmp_path / "mine.py")]
    assert plugins.digests(choices.parse(tables).run.plugins) == [hashlib.sha256(b"").hexdigest()]


def test_a_configuration_made_without_parse_is_checked_too(tmp_path):
    path = written(tmp_path, "raise OSError('no')\n")
    with pytest.raises(ConfigError, match="line 1: OSError: no"):
        choices.check(Config(run=Run(plugins=[path])))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n\nraise ValueError('too\x1bbad')\n", ", line 3: ValueError: too\x1bbad"),
        ("def f():\n    1 / 0\n\nf()\n", ", line 2: ZeroDivisionError: division by zero"),
        ("\nif\n", ", line 2: SyntaxError: "),
        ("import sys\nsys.exit(0)\n", ", line 2: SystemExit: 0"),
        ("import no_such_module\n", ", line 1: ModuleNotFoundError: "),
        (
            "from mpitrain.parallel.modes import MODES\nMODES['local'] = MODES['gossip']\n",
            ", line 2: A name has one row in its table, but 'local' is there already",
        ),
        (
            "from mpitrain.parallel.modes import MODES\nfor _ in 1, 2:\n    MODES['x'] = MODES['local']\n",
            ", line 3: A name has one row in its table, but 'x' is there already",
        ),
        ("\0", ": "),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line_each_time(text, said, tmp_path):
    path = written(tmp_path, text)
    for _ in range(2):
        assert f"{path} cannot be imported{said}" in refusal(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "missing.py", tmp_path):
        assert f"{path} cannot be read: " in refusal(path)


@pytest.mark.parametrize("value", ["mine.py", [1], {"a": 1}, None])
def test_other_types_are_refused(value):
    with pytest.raises(ConfigError, match=r"run\.plugins"):
        choices.parse({"run": {"plugins": value}})


def test_a_file_that_is_not_the_one_of_its_digest_is_refused_unread(tmp_path):
    path = written(tmp_path, "raise AssertionError\n")
    assert "sha256 000000000000, but" in refusal(f"{path} sha256:{'0' * 64}")


@pytest.mark.parametrize("broken", ["missing", "raises", "differs"])
def test_ranks_without_the_same_plugin_are_refused_together(broken, tmp_path):
    """Of ranks in one process, each has a file of its own."""
    paths = [str(tmp_path / f"{rank}.py") for rank in range(3)]
    for rank in range(3):
        if (rank, broken) != (1, "missing"):
            odd = {"raises": "raise OSError\n", "differs": "pass\n"}.get(broken, "")
            written(tmp_path, odd if rank == 1 else "", f"{rank}.py")

    def configured(rank):
        (digest,) = plugins.digests(named(paths[rank]).run.plugins)
        return Config(run=Run(plugins=[f"mine.py sha256:{digest}"]))

    def start(transport):
        with pytest.raises(ConfigError) as raised:
            agree_on(transport, lambda: configured(transport.rank))
        assert raised.value.agreed and raised.value.exit_code == 2
        return raised.value.law

    laws = run_ranks(3, start, hosts="abc")
    assert len(set(laws)) == 1
    if broken == "differs":
        assert "(a)" in laws[0] and "on rank 1 (b)" in laws[0]
    else:
        assert laws[0].startswith("On rank 1 (b): ") and f"plugin {paths[1]} cannot" in laws[0]


def test_a_run_directory_names_no_code_to_run(tmp_path):
    path, ran = tmp_path / "evil.py", tmp_path / "ran"
    path.write_text(f"open({str(ran)!r}, 'w')\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for entry in (f"{path}", f"{path} sha256:{digest}"):
        (tmp_path / "config.toml").write_text(f'run.plugins = ["{entry}"]\n')
        with pytest.raises(ConfigError, match="with the plugin") as raised:
            configuration(tmp_path)
        assert str(path) in raised.value.law and not ran.exists()
    named(path)
    (tmp_path / "config.toml").write_text(
        f'# All 1 keys of a run of mpitrain.\nrun.plugins = ["/elsewhere.py sha256:{digest}"]\n'
    )
    assert plugins.digests(configuration(tmp_path).run.plugins) == [digest]


def test_sections_alone_know_no_names_of_rows():
    assert parse({"replication": {"mode": "of-a-plugin"}}).replication.mode == "of-a-plugin"
    with pytest.raises(ConfigError, match="mean master"):
        choices.parse({"replication": {"mode": "mastr"}})


def test_help_config_imports_the_plugins_that_it_is_given(tmp_path):
    path = written(tmp_path, "from mpitrain.optim import RULES\nRULES['mine'] = RULES['sgd']\n")
    words = ["train", "--help-config", "optimizer", "--set", f'run.plugins=["{path}"]']
    shown = CliRunner().invoke(commands, words)
    assert shown.exit_code == 0 and "| mine" in " ".join(shown.output.split())
