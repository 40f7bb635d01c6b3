"""Shared windows over MPI where there is no room for them."""

import shlex
import shutil
import sys

import numpy as np
import pytest

from mpitrain.cli.launch import command as launch_command
from mpitrain.collectives.group import bind
from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.transport import mpi
from tests.laws.transport import coded
from tests.processes import run


@pytest.mark.parametrize("mpi_ranks", [2])
def test_without_room_memory_is_plain_and_one_line_says_so(mpi_ranks, monkeypatch, capfd):
    transport = mpi.connect()
    monkeypatch.setattr(process, "shared_memory", lambda: 1000)
    array = transport.allocate(1001, "float64")
    assert transport.windows.locate(array, transport.rank) is None
    said = capfd.readouterr().err
    if transport.rank == 0:
        assert said.count("\n") == 1
        assert "has 0 MiB left" in said
        assert "using plain memory" in said
    else:
        assert said == ""
    array[:] = coded(transport.rank, 1001)
    with pytest.raises(ConfigError, match="2 x 8,008") as raised:
        bind(transport, array, algorithm="shared")
    assert raised.value.agreed
    monkeypatch.setattr("mpitrain.collectives.group.choose", lambda *facts: "shared")
    reduction = bind(transport, array, algorithm="auto")
    reduction.run()
    assert reduction.algorithm == "ring"
    assert np.array_equal(array, coded(0, 1001) + coded(1, 1001))


@pytest.mark.parametrize("mpi_ranks", [3])
def test_room_is_left_for_mpi_itself_and_for_other_groups_of_the_host(
    mpi_ranks, monkeypatch, capfd
):
    """Nothing is put into a window where Open MPI would end the job: it wants a twentieth more than a file has."""
    transport = mpi.connect()
    nbytes = 1 << 22
    for size, free, is_shared in (
        (3, 1.0, False),
        (3, 1.05, False),
        (3, 1.35, True),
        (2, 1.35, True),
        (1, 9.0, False),
    ):
        part = transport.split(transport.rank if size == 1 else int(transport.rank < size))
        monkeypatch.setattr(
            process, "shared_memory", lambda size=size, free=free: int(free * size * nbytes)
        )
        array = part.allocate(nbytes, "uint8")
        located = part.windows.locate(array, transport.rank)
        assert (located is not None) == (is_shared and part.size > 1), (size, free)
        del array
        part.close()
    capfd.readouterr()


ON_SMALL = """
import numpy as np
from mpitrain.collectives.group import bind
from mpitrain.transport import mpi

transport = mpi.connect()
array = transport.allocate(int(25.5 * 2**20), "uint8")
array[:] = 1 + transport.rank
bind(transport, array, algorithm="auto").run()
print("plain" if transport.windows.locate(array, transport.rank) is None else "shared", set(array.tolist()), flush=True)
"""


def test_on_a_nearly_full_shared_memory_ranks_fall_back_on_messages(tmp_path):
    """Open MPI ended this job: 51 MiB of the 53 that are free leave less than a twentieth."""
    (tmp_path / "main.py").write_text(ON_SMALL)
    private = ["unshare", "--mount", "bash", "-c"]
    mounts = "mount -t tmpfs -o size=53m tmpfs /dev/shm"
    if launch_command.library().family != "Open MPI":
        pytest.skip("MPICH keeps nothing free")
    if shutil.which("unshare") is None or run([*private, mounts]).returncode:
        pytest.skip("nothing can be mounted here")
    words, _ = launch_command.command_line(2, [], [sys.executable, str(tmp_path / "main.py")])
    done = run([*private, f"{mounts} && {shlex.join(words)}"], env=process.environment_of_one())
    assert done.returncode == 0, done.stderr
    assert done.stdout == "plain {3}\n" * 2 and "using plain memory" in done.stderr
