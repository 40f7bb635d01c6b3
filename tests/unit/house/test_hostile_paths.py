"""Links at paths that can be foreseen, or in a run directory from somebody else: nothing is written or removed through them."""

import fcntl
import os
import shutil
import tempfile
import time

import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import MpitrainError
from mpitrain.files import appending
from mpitrain.trace.recorder import Recorder
from mpitrain.trace.startup import begun, left
from tests.unit.run.test_run_dir import trained

LONG_AGO = time.time() - 10 * 86_400


def listed(folder):
    """Every name below a folder, with the bytes of files."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture
def victim(tmp_path):
    """Somebody's folder of old things."""
    folder = tmp_path / "victim"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis/chapter").write_text("years of work")
    (folder / "file").write_text("kept")
    (folder / "1234").mkdir()
    (folder / "1234/rank-00000").write_text("not a trace")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"mpitrain-{os.getuid()}"


def start():
    """Begin a start-up trace, and record something in it."""
    recorder = begun(0, 2)
    recorder.end(recorder.compute(recorder.name("a layer")))
    return recorder


def test_a_link_in_the_place_of_the_start_up_traces_is_not_followed(victim, temporary):
    temporary.symlink_to(victim)
    before = listed(victim)
    start()
    assert listed(victim) == before and left() == []


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770])
def test_a_folder_of_start_up_traces_that_others_can_enter_is_not_used(mode, temporary):
    (temporary / "1").mkdir(parents=True)
    temporary.chmod(mode)
    os.utime(temporary / "1", (LONG_AGO, LONG_AGO))
    start()
    assert [path.name for path in temporary.iterdir()] == ["1"] and left() == []


def test_of_old_start_up_traces_only_ours_are_removed(victim, temporary):
    temporary.mkdir(mode=0o700)
    for name in (
        "11/rank-00000",
        "11/rank-00001",
        "12-13/rank-00000",
        "14/rank-00000",
        "14/notes",
        "others/rank-00000",
        "15/rank-0",
        "16/rank-00000/deeper",
    ):
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).touch()
    (temporary / "17").symlink_to(victim / "1234")
    (temporary / "18").mkdir()
    (temporary / "18/rank-00000").symlink_to(victim / "file")
    (temporary / "19").touch()
    for path in temporary.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    before = listed(victim)
    start()
    assert {path.name for path in temporary.iterdir()} == {
        "14",
        "others",
        "15",
        "16",
        "17",
        "18",
        "19",
        str(os.getppid()),
    }
    assert listed(victim) == before
    assert [path.name for path in left()][-1] == str(os.getppid()) and "17" not in [
        path.name for path in left()
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trained(folder, "run.steps=2")
    return folder


@pytest.fixture
def handed(finished, tmp_path):
    """That run as somebody hands it over."""
    return shutil.copytree(finished, tmp_path / "handed")


LEFT_OVERS = (
    "config.toml.partial",
    "metrics.jsonl.partial",
    "checkpoints/.step-00000003.partial",
    "checkpoints/.step-00000001.dropped",
    "report/perfetto.json.partial",
    "report/report.html.partial",
    "report/perfetto.json",
    "report/report.html",
)


@pytest.mark.slow
def test_links_at_written_names_are_replaced_and_not_followed(handed, victim):
    pytest.importorskip("bokeh")
    (handed / "report").mkdir()
    shutil.rmtree(handed / "trace")
    (handed / "trace").symlink_to(victim)
    for name in LEFT_OVERS:
        (handed / name).symlink_to(victim if ".step" in name else victim / "file")
    before = listed(victim)
    trained(handed, "run.steps=3", resume="yes")
    shown = CliRunner().invoke(commands, ["report", str(handed)])
    assert shown.exit_code == 0, shown.output
    assert listed(victim) == before
    assert not [path for path in handed.rglob("*") if path.is_symlink()]
    assert sorted(path.name for path in (handed / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]


@pytest.mark.parametrize(
    "name, command",
    [
        ("lock", "train"),
        ("checkpoints", "train"),
        ("checkpoints/step-00000002", "train"),
        ("report", "report"),
    ],
)
def test_a_link_at_the_name_of_what_is_written_or_swept_is_refused_by_name(
    name, command, handed, tmp_path
):
    (tmp_path / "elsewhere").mkdir()
    if (handed / name).exists():
        (handed / name).rename(tmp_path / "elsewhere/it")
    else:
        (tmp_path / "elsewhere/it").mkdir()
    (handed / name).symlink_to(tmp_path / "elsewhere/it")
    before = listed(tmp_path / "elsewhere")
    if command == "train":
        with pytest.raises(MpitrainError) as raised:
            trained(handed, "run.steps=3", resume="yes")
        said, code = str(raised.value), raised.value.exit_code
    else:
        shown = CliRunner().invoke(commands, [command, str(handed)])
        said = shown.output + str(shown.exception or "")
        code = (
            2
            if isinstance(shown.exception, OSError)
            else getattr(shown.exception, "exit_code", shown.exit_code)
        )
    assert listed(tmp_path / "elsewhere") == before
    if name == "checkpoints/step-00000002":
        assert "ended before its first" in said  # a link is no checkpoint
    else:
        assert "symbolic link" in said and name in said
    assert code == 2


def test_a_linked_file_of_a_checkpoint_is_read(handed, tmp_path):
    """Its digests say whether it is the right one."""
    for name in ("manifest.json", "state-00000.safetensors"):
        file = handed / "checkpoints/step-00000002" / name
        file.rename(tmp_path / name)
        file.symlink_to(tmp_path / name)
    before = listed(tmp_path)
    trained(handed, "run.steps=3", "checkpoint.keep=1", resume="yes")
    assert {name: before[name] for name in before if len(name.parts) == 1} == {
        path.relative_to(tmp_path): path.read_bytes() if path.is_file() else None
        for path in tmp_path.iterdir()
    }


@pytest.mark.slow
def test_a_run_directory_that_is_named_by_a_link_works(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    trained(tmp_path / "link", "run.steps=3", resume="yes")
    assert (tmp_path / "run/checkpoints/step-00000003").is_dir()
    assert CliRunner().invoke(commands, ["report", str(tmp_path / "link")]).exit_code == 0
    assert (tmp_path / "run/report/perfetto.json").is_file()


def test_a_lock_is_not_cut_off_before_it_is_held(handed):
    held = appending(handed / "lock")
    os.ftruncate(held, 0)
    os.write(held, b"process 1 on somewhere")
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(MpitrainError, match=r"A run is going on in .* \(process 1 on somewhere\)"):
        trained(handed, "run.steps=3", resume="yes")
    os.close(held)
    assert (handed / "lock").read_text() == "process 1 on somewhere"


@pytest.mark.parametrize(
    "name", ["config.toml.partial", "metrics.jsonl.partial", "checkpoints/.step-00000003.partial"]
)
def test_what_is_in_the_way_is_named_and_nobody_is_told_to_make_room(name, handed):
    if name.startswith("checkpoints"):
        (handed / name).touch()  # a leftover that is swept, whatever it is
        trained(handed, "run.steps=3", resume="yes")
        return
    (handed / name).mkdir()
    with pytest.raises(MpitrainError) as raised:
        trained(handed, "run.steps=3", resume="yes")
    assert f"directory named {name}" in str(raised.value)
    assert f"Remove {handed / name}" in str(raised.value) and "oom" not in str(raised.value)


def test_a_checkpoint_that_was_half_dropped_is_swept_at_the_next_start(handed):
    (handed / "checkpoints/.step-00000001.dropped").mkdir()
    (handed / "checkpoints/.step-00000001.dropped/state").touch()
    shutil.copytree(
        handed / "checkpoints/step-00000002", handed / "checkpoints/.step-00000002.replaced"
    )
    trained(handed, resume="yes")
    assert [path.name for path in (handed / "checkpoints").iterdir()] == ["step-00000002"]


def test_control_characters_in_a_trace_are_shown_and_not_obeyed(handed):
    pytest.importorskip("bokeh")
    recorder = Recorder()
    recorder.facts(rank=0, ranks=1, host="\x1b]0;owned\x07\x9b2J<b>", run="r")
    recorder.begin(2, recorder.name("\x1b[31mred\u202e"), peer=0)
    recorder.keep(handed / "trace/rank-00000")
    (handed / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    shown = CliRunner().invoke(commands, ["report", str(handed)])
    page = (handed / "report/report.html").read_text()
    for text in (shown.output, page):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}
        assert "\\x1b]0;owned\\x07\\x9b2J" in text and "\\x1b[31mred\\u202e" in text
    assert "2J<b>" not in page
