"""Files: durable before they get their name; what a user names as a file may be anything and nothing waits for it."""

import ast
import errno
import json
import os
from pathlib import Path

import pytest

import mpitrain
from mpitrain.collectives.selection.tuning import read_tuning
from mpitrain.config import read_toml
from mpitrain.data import open_source
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.files import check_writable, contents, write_whole
from mpitrain.ops.cuda.tiles import read_tiles
from mpitrain.transport.agreement import on_all_ranks
from mpitrain.transport.threads import run_ranks


def test_a_file_is_synced_before_its_rename_and_its_folder_after(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda f: (events.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f))
    )
    monkeypatch.setattr(
        os, "rename", lambda *names, **more: (events.append("renamed"), rename(*names, **more))
    )
    write_whole(tmp_path / "file", "größer 😀\r\n")
    assert events == [f"{tmp_path}/file.partial", "renamed", str(tmp_path)]
    assert (tmp_path / "file").read_bytes() == "größer 😀\r\n".encode() and len(
        list(tmp_path.iterdir())
    ) == 1


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


READERS = {
    "configuration": read_toml,
    "tuning": read_tuning,
    "tiles": read_tiles,
    "idx": lambda path: open_source(f"idx:{path.parent}", 8, "float32"),
    "text": lambda path: open_source(f"text:{path}", 8, "float32"),
    "tokens": lambda path: open_source(f"tokens:{path}", 8, "float32"),
    "conversations": lambda path: open_source(f"jsonl:{path}", 8, "float32"),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_refused_at_once(reader, kind, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    make = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/null"),
        "folder": os.mkdir,
        "loop": lambda path: path.symlink_to(path),
    }
    make[kind](path)
    with pytest.raises(MpitrainError) as raised:
        READERS[reader](path)
    assert raised.value.exit_code == 2 and str(tmp_path) in str(raised.value)


OPENS = {
    "files.py",
    *("data/arrays.py", "data/hdf5.py"),  # NumPy and h5py take a name; check_regular comes before.
    *(
        "cli/terminal/output.py",
        "tools/textbook/exercises/child.py",
        "transport/failures.py",
    ),  # /dev/null
    *("cli/terminal/stop_requests.py", "machine/compiling.py", "machine/process.py"),  # /proc
    *("transport/library.py", "transport/siblings.py", "tools/doctor/probes.py"),  # /proc and /sys
    "machine/meters.py",  # /sys
    "tools/bench/segments.py",  # the same
    "tools/doctor/trials.py",  # files that it has made
    *("cli/slurm/script.py", "kernels/source.py", "kernels/simulator/build.py", "tools/words.py"),
    "hints.py",
    *("ops/host/compiled.py", "tools/textbook/explain/page.py", "tools/textbook/explain/tiling.py"),
    "tools/report/page.py",
}
"""The files of the package that open a file themselves; those of the last lines open files of the package."""
OPENERS = {"read_text", "read_bytes", "open_memmap", "memmap", "fromfile"}


def test_every_file_that_a_user_names_is_opened_by_one_function():
    """It wants a regular file: a pipe would hang, and a device fill memory."""
    root, found = Path(mpitrain.__file__).parent, set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                *owner, name = ast.unparse(node.func).split(".")
                is_open = name == "open" and (
                    not owner or owner[-1] in ("os", "io", "path", "file")
                )
                if (
                    is_open
                    or name in OPENERS
                    or (owner, name) in ((["h5py"], "File"), (["np"], "load"))
                ):
                    found.add(str(file.relative_to(root)))
    assert found == OPENS


def test_a_regular_file_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 300)
    (tmp_path / "link").symlink_to("file")
    assert contents(tmp_path / "link") == bytes(range(256)) * 300
    with pytest.raises(FileNotFoundError):
        contents(tmp_path / "missing")


TILE = {
    "elements": "float32",
    "stored": "NT",
    "m": 1,
    "n": 1,
    "k": 1,
    "kernel": "gemm",
    "plan": [[128, 128, 8, 8, 8], 1],
}
GARBAGE = {
    "text": "neither this nor that " * 900,
    "word": json.dumps("x" * 20000),
    "deep": "[" * 20000,
    "number": "9" * 20000,
    "plans": json.dumps({"machine": {}, "plans": {"y " * 9000: {}}, "whole": {}}),
    "knots": json.dumps(
        {"machine": {}, "plans": {"2": {"plain": {"1": ["z " * 9000]}}}, "whole": {}}
    ),
    "huge": '{"machine": {}, "plans": {"2": {"plain": {"1": [1' + "0" * 400 + "]}}}}",
    "kernel": json.dumps({"measured": [{**TILE, "kernel": "v " * 9000}]}),
    "shape": json.dumps({"measured": [{**TILE, "m": "w " * 9000}]}),
    "bytes": "\udcff\udc80",
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("reader", ["configuration", "tuning", "tiles"])
def test_garbage_is_refused_in_few_words(reader, garbage, tmp_path):
    path = tmp_path / "garbage"
    path.write_bytes(GARBAGE[garbage].encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as raised:
        READERS[reader](path)
    assert len(str(raised.value)) < 700 and str(path) in str(raised.value)


@pytest.mark.parametrize("name", ["n" * 300, "n/" * 3000])
def test_a_path_that_is_too_long_is_one_short_error_on_all_ranks(name, tmp_path):
    uses = (
        lambda: (tmp_path / name).exists(),
        lambda: check_writable(tmp_path / name),
        lambda: os.mkdir(tmp_path / name),
    )

    def main(transport):
        said = []
        for use in uses:
            with pytest.raises(ConfigError) as raised:
                on_all_ranks(transport, use)
            assert raised.value.agreed and len(str(raised.value)) < 700
            said.append("File name too long" in raised.value.law)
        return said

    assert run_ranks(2, main) == [[True] * 3] * 2


def test_a_file_system_that_syncs_no_folders_can_be_written_to(tmp_path, monkeypatch):
    fsync = os.fsync

    def files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
