"""The MPI library that mpi4py loads: its name, its ABI, its launcher, and what it has beyond the standard.

A process loads one library. The wheels of mpi4py contain modules for the ABI of Open MPI and for that
of MPICH, and take the one that fits the library which the loader or MPI4PY_LIBMPI names. An mpi4py
that was built for the ABI of the MPI Forum fits every library that has it.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.machine import process

PROMISES = {
    "MPICH_GPU_SUPPORT_ENABLED": "Cray MPICH",
    "MV2_USE_CUDA": "MVAPICH",
    "I_MPI_OFFLOAD": "Intel MPI",
}
"""Variables that declare an MPI library CUDA-aware, for libraries without a query function."""


class Extension(NamedTuple):
    """What we ask of an MPI library, but not every library has.

    names    of a function, of which a library has one; the first one is in the standard, or will be
    use      what it is asked for
    without  what happens where the library lacks it
    """

    names: tuple[str, ...]
    use: str
    without: str


BEYOND = {
    "CUDA query": Extension(
        ("MPIX_Query_cuda_support", "MPIX_GPU_query_support"),
        "whether messages may lie in GPU memory",
        "a variable may promise it; else messages go through host memory",
    ),
    "ULFM": Extension(
        ("MPI_Comm_revoke", "MPIX_Comm_revoke"),
        "to go on after the loss of a rank",
        "the loss of a rank ends the job, which may start again from a checkpoint",
    ),
    "MPI Forum ABI": Extension(
        ("MPI_Abi_get_version",),
        "which modules of mpi4py fit",
        "the library has the ABI of its family",
    ),
}
"""{name: what we ask of an MPI library beyond MPI 3.1}."""


class Family(NamedTuple):
    """Libraries whose ranks one kind of launcher starts.

    signs     words in the version text of such a library
    launcher  command that starts its ranks
    prints    word that this command prints with --version
    """

    signs: tuple[str, ...]
    launcher: str
    prints: str


FAMILIES = {
    "Open MPI": Family(("Open MPI",), "mpirun", "Open MPI"),
    "Intel MPI": Family(("Intel(R) MPI",), "mpiexec", "Intel(R) MPI"),
    "MPICH": Family(("MPICH", "MVAPICH"), "mpiexec", "HYDRA"),
}


class Library(NamedTuple):
    """The facts about the MPI library in use.

    version       its name and version
    standard      version of the MPI standard, such as (3, 1)
    abi           version of the MPI Forum's ABI, such as (1, 0); (-1, -1): the ABI of its family
    thread_level  single, funneled, serialized or multiple
    path          the loaded shared object; "" if unknown
    """

    version: str
    standard: tuple[int, int]
    abi: tuple[int, int]
    thread_level: str
    path: str


class Awareness(NamedTuple):
    """Whether MPI accepts messages in GPU memory, and the source of this answer.

    A yes is only the library's claim, without proof.
    """

    cuda: bool
    how: str


def library() -> Library:
    """Query the MPI library that mpi4py loads; starts MPI."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return Library(
        named(MPI.Get_library_version()),
        MPI.Get_version(),
        abi_of(MPI),
        levels[MPI.Query_thread()],
        loaded_path(),
    )


def abi_of(MPI: Any) -> tuple[int, int]:
    """Return the version of the MPI Forum's ABI for which mpi4py was built; (-1, -1) for another ABI."""
    return MPI.Get_abi_version() if hasattr(MPI, "Get_abi_version") else (-1, -1)


def family_of(version: str) -> str:
    """Return the name in FAMILIES of the library with this version text; "" if it is none of them."""
    return next((name for name, of in FAMILIES.items() if any(s in version for s in of.signs)), "")


def named(version: str) -> str:
    """Return name and version from the library's version text, such as MPICH 5.0.2."""
    first = version.split("\n")[0].rstrip("\0").split(", package")[0].strip()
    return re.sub(r"\s+Version\s*:\s*", " ", first)


def loaded_path(name: str = "libmpi") -> str:
    """Return the path of the library of this name that this process has mapped, or "".

    That of MPI is mapped with mpi4py.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if f"/{name}" in line}
    return min(paths, key=len, default="")


UCX_CUDA = "libuct_cuda"
"""UCX's transports of GPU memory, which it loads at its start where there is a driver."""


def by_ucx(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI was told to send all messages through UCX."""
    return environ.get("OMPI_MCA_pml") == "ucx"


def ucx_line(environ: Mapping[str, str]) -> str:
    """Return what UCX is loaded and whether it moves GPU memory; "" without UCX."""
    if not (path := loaded_path("libucp")):
        return ""
    ask = ctypes.CDLL(path).ucp_get_version_string
    ask.restype = ctypes.c_char_p
    use = "sends" if by_ucx(environ) else "without `mpirun --mca pml ucx` it does not send"
    lacking = "it has no transports of GPU memory"
    if loaded_path(UCX_CUDA):
        lacking = "it has transports of GPU memory"
    elif found := next(Path(path).parent.glob(f"ucx/{UCX_CUDA}.so*"), None):
        try:
            ctypes.CDLL(str(found))
        except OSError as error:
            lacking = f"its transports of GPU memory do not load: {error}"
    return f"{ask().decode()}, {path}; {use} messages; {lacking}"


def cuda_awareness(path: str, environ: Mapping[str, str]) -> Awareness:
    """Query the library at `path` through ctypes; without a query function, trust PROMISES.

    Open MPI: MPIX_Query_cuda_support(), which says how it was built. If UCX sends its messages, it
    passes their addresses on, and a UCX of CUDA moves them. MPICH: MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA = 0,
    &flag).
    """
    if not path:
        return Awareness(False, "no libmpi is loaded")
    handle = ctypes.CDLL(path)
    if hasattr(handle, "MPIX_Query_cuda_support"):
        if not handle.MPIX_Query_cuda_support() and by_ucx(environ) and loaded_path(UCX_CUDA):
            return Awareness(True, "UCX, which has transports of GPU memory")
        return Awareness(bool(handle.MPIX_Query_cuda_support()), "MPIX_Query_cuda_support")
    for variable, name in PROMISES.items():
        if environ.get(variable, "0") != "0":
            return Awareness(True, f"{variable}={environ[variable]} ({name})")
    if hasattr(handle, "MPIX_GPU_query_support"):
        flag = ctypes.c_int(0)
        failed = handle.MPIX_GPU_query_support(0, ctypes.byref(flag))
        return Awareness(not failed and bool(flag.value), "MPIX_GPU_query_support")
    return Awareness(
        False, "the library has no function to ask, and no environment variable promises it"
    )


def lacking(path: str) -> list[str]:
    """Return the names in BEYOND of what the library at `path` lacks."""
    handle = ctypes.CDLL(path)
    return [
        name
        for name, extension in BEYOND.items()
        if not any(hasattr(handle, function) for function in extension.names)
    ]


def launcher_of(version: str, path: str = "") -> str:
    """Return the path of the launcher that belongs to an MPI library.

    It is looked for in the `bin` beside the folder of the library, in the folder of this Python, and
    on PATH. The first numbers of the versions of Open MPI's library and launcher must be the same;
    otherwise the ranks do not find each other.

    version  text of the library, of one of FAMILIES
    path     of the library; "": unknown
    raises   ConfigError if there is no such launcher
    """
    family = FAMILIES[family_of(version)]
    beside = Path(path).resolve().parent
    places = [
        str(Path(sys.executable).parent),
        *process.environment().get("PATH", "").split(os.pathsep),
    ]
    if path:
        # Of Intel MPI, the library may lie in lib/release.
        places = [str(beside.parent / "bin"), str(beside.parent.parent / "bin"), *places]
    complaints = []
    launchers = (shutil.which(family.launcher, path=place) for place in places)
    for candidate in dict.fromkeys(filter(None, launchers)):
        asked = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if family.prints in asked.stdout:
            if first_number(asked.stdout) in ("", first_number(version)):
                return candidate
            other = asked.stdout.splitlines()[0].strip()
            complaints.append(f"{candidate} is of {other}, but mpi4py loads {version}")
        elif asked.returncode:
            lines = (asked.stderr + asked.stdout).splitlines()
            answer = next((line for line in lines if line.strip("- ")), "nothing")
            complaints.append(f"{candidate} --version ended with {asked.returncode}: {answer}")
    if complaints:
        raise ConfigError(
            "\n".join(complaints), "Load the launcher of that MPI, or start the ranks by hand."
        )
    raise ConfigError(
        f"mpi4py loads {version}{f' from {path}' if path else ''}, but its {family.launcher} is neither beside it, nor in the "
        f"folder of {sys.executable}, nor on PATH.",
        "Install the launcher of that MPI, or unload the other one.",
    )


def first_number(version: str) -> str:
    """Return the first number of a version text of Open MPI or of its mpirun; "" if there is none."""
    match = re.search(r"Open MPI\)? v?(\d+)\.", version)
    return match[1] if match else ""
