"""Where compiled kernels are kept: libraries are loaded from there, so nobody else may be able to put one there."""

import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from mpitrain.errors import ConfigError
from mpitrain.kernels import source
from mpitrain.kernels.simulator import build
from mpitrain.kernels.source import read_source
from mpitrain.machine import compiling

KERNELS = Path(source.__file__).parent


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The shared temporary folder of a user who has no home."""
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiling._fresh_folder.cache_clear()
    yield tmp_path
    compiling._fresh_folder.cache_clear()


def mode(path):
    return path.lstat().st_mode & 0o777


@pytest.mark.parametrize("named", [{"HOME": "{}"}, {"XDG_CACHE_HOME": "{}/.cache"}])
def test_at_home_it_is_used_again_and_nobody_else_can_write_there(tmp_path, monkeypatch, named):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    folder = compiling.cache_of("simulator")
    assert folder == tmp_path / ".cache/mpitrain/simulator" and mode(folder) == 0o700
    folder.chmod(0o755)
    assert compiling.cache_of("simulator") == folder, "others may read it"


def test_without_a_home_it_is_private_too_and_used_again(temporary):
    folder = compiling.cache_of("simulator")
    assert folder == temporary / f"mpitrain-simulator-{os.getuid()}" and mode(folder) == 0o700
    assert compiling.cache_of("simulator") == folder


@pytest.mark.parametrize(
    "how", ["others may write", "the group may write", "somebody else's", "a link", "a file"]
)
def test_a_folder_in_which_others_may_write_is_not_used(how, temporary, monkeypatch):
    if how == "somebody else's":
        uid = os.getuid() + 1
        monkeypatch.setattr(compiling.os, "getuid", lambda: uid)
    found = temporary / f"mpitrain-simulator-{os.getuid()}"
    if how == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        found.symlink_to(temporary / "elsewhere")
    elif how == "a file":
        found.write_text("")
    else:
        found.mkdir()
        found.chmod({"others may write": 0o777, "the group may write": 0o770}.get(how, 0o700))
    folder = compiling.cache_of("simulator")
    assert (
        folder.parent == temporary
        and folder != found
        and mode(folder) == 0o700
        and not list(folder.iterdir())
    )
    assert compiling.cache_of("simulator") == folder, "one for the whole process"


@pytest.mark.parametrize("mode, is_trusted", [(0o1777, True), (0o777, False), (0o770, False)])
def test_a_hostile_temporary_folder_is_not_used_again(mode, is_trusted, temporary):
    temporary.chmod(mode)
    found = temporary / f"mpitrain-simulator-{os.getuid()}"
    assert (compiling.cache_of("simulator") == found) == is_trusted


def test_of_many_that_want_a_library_at_once_one_compiles_it(tmp_path, monkeypatch):
    compiled = []

    def slowly(arguments, target, what, way_out):
        compiled.append(target)
        time.sleep(0.2)
        target.write_text(what)

    monkeypatch.setattr(build, "compile_cpp", slowly)
    with ThreadPoolExecutor(4) as ranks:
        found = list(ranks.map(build.build_runtime, [tmp_path] * 4))
    assert len(set(found)) == len(compiled) == 1 and found[0].read_text().startswith("the runtime")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda library, digest: library.write_bytes(b""),
        lambda library, digest: library.write_bytes(library.read_bytes()[:5]),
        lambda library, digest: library.write_bytes(library.read_bytes().upper()),
        lambda library, digest: library.unlink(),
        lambda library, digest: digest.write_bytes(b""),
        lambda library, digest: digest.write_bytes(b"\xff" * 64),
        lambda library, digest: digest.unlink(),
    ],
    ids=["empty", "cut", "garbled", "missing", "digest-empty", "digest-garbled", "digest-missing"],
)
def test_a_library_that_does_not_fit_its_digest_is_compiled_anew(spoil, tmp_path, monkeypatch):
    """A library that was cut would end the process that maps it."""
    compiled = []

    def compile_cpp(arguments, target, what, way_out):
        compiled.append(target)
        target.write_text(what)

    monkeypatch.setattr(build, "compile_cpp", compile_cpp)
    library = build.build_runtime(tmp_path)
    whole = library.read_bytes()
    spoil(library, library.with_name(f"{library.name}.sha256"))
    for _ in range(2):
        assert build.build_runtime(tmp_path).read_bytes() == whole
        assert len(compiled) == 2


def test_code_and_its_digest_are_durable_before_they_get_their_names(tmp_path, monkeypatch):
    """The host may crash at any moment."""
    target, synced = tmp_path / "code.so", []
    monkeypatch.setattr(
        compiling.os,
        "fsync",
        lambda file: synced.append((os.fstat(file).st_ino, sorted(tmp_path.glob("code.so*")))),
    )
    compiling.compiled_once(target, "code", lambda part: part.write_text("code"))
    names = [target, tmp_path / "code.so.sha256"]
    *files, folder = synced
    assert sorted(files) == sorted((name.stat().st_ino, []) for name in names)
    assert folder == (tmp_path.stat().st_ino, names)


KILLED = """
import os, pathlib, signal, sys
from mpitrain.machine.compiling import compiled_once

def compile(part):
    part.write_text("half of the co")
    os.kill(os.getpid(), signal.SIGKILL)

compiled_once(pathlib.Path(sys.argv[1]), "code", compile)
"""


def test_the_next_compilation_removes_what_one_that_was_killed_left(tmp_path, monkeypatch):
    """But nothing of another host or another target, or where files cannot be locked: that may be in use."""
    target = tmp_path / "code.so"
    subprocess.run([sys.executable, "-c", KILLED, target], timeout=60, check=False)
    (left,) = tmp_path.glob(".code.so.*")
    assert (left / "code.so").read_text() == "half of the co"
    others = [
        tmp_path / f".code.so.{platform.node()}2.x",
        tmp_path / left.name.replace("e.so", "f.so"),
    ]
    for folder in others:
        folder.mkdir()

    def compile(part):
        part.write_text("code")

    with monkeypatch.context() as without_locks:
        without_locks.setattr(compiling.fcntl, "flock", Mock(side_effect=OSError("no locks")))
        compiling.compiled_once(target, "code", compile)
    assert left.exists()
    target.unlink()
    compiling.compiled_once(target, "code", compile)
    assert sorted(path for path in tmp_path.iterdir() if path.is_dir()) == sorted(others)


@pytest.mark.parametrize("name", ["code.lock", "code.so", "code.so.sha256"])
def test_a_folder_in_the_place_of_a_file_is_a_refusal_that_names_it(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError) as refusal:
        compiling.compiled_once(tmp_path / "code.so", "code", lambda part: part.write_text("code"))
    assert f"Remove {tmp_path / name}," in refusal.value.way_out


@pytest.mark.parametrize("rank, said", [(0, 1), (1, 0)])
def test_rank_0_reports_a_kernel_compilation_once(rank, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        build, "compile_cpp", lambda arguments, target, what, way_out: target.write_text(what)
    )
    monkeypatch.setattr(
        build.process, "launched", lambda: build.process.Launched("Open MPI", rank, 2, rank, 2)
    )
    for name in ("steps.cu", "totals.cu", "steps.cu"):
        build.build_kernels(read_source(KERNELS / name), {}, "fast", 80, tmp_path)
    text = capsys.readouterr().err
    assert (
        text.count("Compiling kernels for cuda-sim with ")
        == text.count(str(tmp_path))
        == text.count("\n")
        == said
    )
    build._say_that_it_compiles.cache_clear()
    build.build_kernels(read_source(KERNELS / "steps.cu"), {}, "fast", 80, tmp_path)
    assert not capsys.readouterr().err, "all of it is there"
