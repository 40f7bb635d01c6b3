"""What an MPI library is called, which launcher belongs to it, and what it lacks."""

import ctypes.util
import os
import subprocess

import pytest

from mpitrain.errors import ConfigError
from mpitrain.transport import library as library_module
from mpitrain.transport.library import (
    BEYOND,
    cuda_awareness,
    family_of,
    lacking,
    launcher_of,
    named,
    ucx_line,
)


def test_without_a_library_the_answer_is_no():
    assert cuda_awareness("", {}) == (False, "no libmpi is loaded")


def test_the_environment_is_believed_where_there_is_nothing_to_ask():
    path = ctypes.util.find_library("c")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "1"}) == (True, "MV2_USE_CUDA=1 (MVAPICH)")
    assert cuda_awareness(path, {"MV2_USE_CUDA": "0"}).cuda is False


@pytest.mark.parametrize(
    "text, name, family",
    [
        (
            "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, "
            "ident: 5.0.11, repo rev: v5.0.11rc1, Sep 16, 2026\0",
            "Open MPI v5.0.11",
            "Open MPI",
        ),
        (
            "MPICH Version:      5.0.2\nMPICH Release date: Mon Jun 1 2026\nMPICH ABI:          17:2:5\n",
            "MPICH 5.0.2",
            "MPICH",
        ),
        (
            "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : Wed March 02\n",
            "MVAPICH2 2.3.7",
            "MPICH",
        ),
        (
            "Intel(R) MPI Library 2021.11 for Linux* OS\n",
            "Intel(R) MPI Library 2021.11 for Linux* OS",
            "Intel MPI",
        ),
        ("Fujitsu MPI Library 4.0.1", "Fujitsu MPI Library 4.0.1", ""),
    ],
)
def test_a_library_has_a_name_a_version_and_a_family(text, name, family):
    assert named(text) == name and family_of(name) == family


def command(folder, name, text, code=0):
    """Make a launcher that answers --version with a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{text}'; exit {code}\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.mark.parametrize(
    "library, name, text",
    [
        ("MPICH 5.0.2", "mpiexec", "HYDRA build details: Version: 5.0.2"),
        ("Intel(R) MPI Library 2021.18.1", "mpiexec", "Intel(R) MPI Library for Linux* OS"),
        ("Open MPI v5.0.11", "mpirun", "mpirun (Open MPI) 5.0.11"),
    ],
)
@pytest.mark.parametrize("place", ["lib", "lib/release"])
def test_the_launcher_beside_the_library_comes_before_those_on_the_path(
    monkeypatch, tmp_path, library, name, text, place
):
    """As after `module load`, or with MPI4PY_LIBMPI alone: nothing else needs to be set."""
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path / "other"), prepend=os.pathsep)
    other = command(tmp_path / "other", name, text)
    path = tmp_path / "site" / place / "libmpi.so"
    path.parent.mkdir(parents=True)
    assert launcher_of(library, str(path)) == other
    own = command(tmp_path / "site/bin", name, text)
    assert launcher_of(library, str(path)) == own
    command(tmp_path / "site/bin", name, "another program")
    assert launcher_of(library, str(path)) == other


def test_a_missing_launcher_is_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"MPICH 5.0.2 from /opt/x/lib/libmpi.so.12, but its mpiexec"
    ):
        launcher_of("MPICH 5.0.2", "/opt/x/lib/libmpi.so.12")


def test_a_launcher_of_another_open_mpi_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    command(tmp_path / "four", "mpirun", "mpirun (Open MPI) 4.1.4")
    five = command(tmp_path / "five", "mpirun", "mpirun (Open MPI) 5.0.8")
    monkeypatch.setenv("PATH", f"{tmp_path}/four:{tmp_path}/five")
    assert launcher_of("Open MPI v5.0.11") == five
    monkeypatch.setenv("PATH", f"{tmp_path}/four")
    with pytest.raises(ConfigError, match=r"4\.1\.4"):
        launcher_of("Open MPI v5.0.11")


def test_a_launcher_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command(tmp_path, "mpiexec", "Unable to get the user home directory", code=1)
    with pytest.raises(ConfigError, match="ended with 1: Unable to get"):
        launcher_of("MPICH 5.0.2")


def test_what_a_library_lacks_is_named():
    assert lacking(ctypes.util.find_library("c")) == [*BEYOND]


def test_a_ucx_with_transports_of_gpu_memory_makes_open_mpi_a_candidate(monkeypatch, tmp_path):
    """Open MPI says how it was built: then only UCX's own transports count, and only if it sends the messages."""
    mpi = built(tmp_path, "int MPIX_Query_cuda_support(void) { return 0; }")
    loaded = {"libuct_cuda": "/ucx/libuct_cuda.so.0"}
    monkeypatch.setattr(library_module, "loaded_path", lambda name="libmpi": loaded.get(name, ""))
    assert cuda_awareness(mpi, {"OMPI_MCA_pml": "ucx"}).cuda
    assert not cuda_awareness(mpi, {"OMPI_MCA_pml": "ob1"}).cuda
    loaded.clear()
    assert not cuda_awareness(mpi, {"OMPI_MCA_pml": "ucx"}).cuda


def test_what_ucx_lacks_is_named(monkeypatch, tmp_path):
    version = 'const char* ucp_get_version_string(void) { return "1.22.0"; }'
    ucp, loaded = built(tmp_path, version), {}
    monkeypatch.setattr(library_module, "loaded_path", lambda name="libmpi": loaded.get(name, ""))
    assert ucx_line({}) == ""
    loaded["libucp"] = ucp
    assert ucx_line({}).startswith("1.22.0, ") and "no transports" in ucx_line({})
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx/libuct_cuda.so.0").write_text("no library")
    assert "do not load" in ucx_line({"OMPI_MCA_pml": "ucx"})
    loaded["libuct_cuda"] = "there"
    assert ucx_line({"OMPI_MCA_pml": "ucx"}).endswith(
        "sends messages; it has transports of GPU memory"
    )


def built(folder, code):
    """The path of a library with this function."""
    (folder / "a.c").write_text(code)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", folder / "liba.so", folder / "a.c"], check=True
    )
    return str(folder / "liba.so")
