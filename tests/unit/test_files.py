"""Whole files: durable before they get their name, and what was there stays where writing fails."""

import os
from pathlib import Path

import pytest

from mpitrain.files import write_whole


def test_a_file_is_on_disk_before_it_gets_its_name_and_the_name_before_we_return(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda f: (events.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("renamed"), replace(path, to)))
    write_whole(tmp_path / "file", "größer 😀\r\n")
    assert events == [f"{tmp_path}/file.partial", "renamed", str(tmp_path)]
    assert (tmp_path / "file").read_bytes() == "größer 😀\r\n".encode() and len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "before")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", "after")
    assert (tmp_path / "file").read_text() == "before"
