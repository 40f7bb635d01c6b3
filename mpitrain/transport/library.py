"""Facts about the MPI library: name, version, thread level, and whether it can read GPU memory."""

import ctypes
import re
from collections.abc import Mapping
from typing import NamedTuple

PROMISES = {
    "MPICH_GPU_SUPPORT_ENABLED": "Cray MPICH",
    "MV2_USE_CUDA": "MVAPICH",
    "I_MPI_OFFLOAD": "Intel MPI",
}
"""Variables that declare an MPI library CUDA-aware, for libraries without a query function."""


class Library(NamedTuple):
    """The facts about the MPI library in use.

    version       its name and version
    standard      version of the MPI standard, such as (3, 1)
    thread_level  single, funneled, serialized or multiple
    path          the loaded shared object; "" if unknown
    """

    version: str
    standard: tuple[int, int]
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
        levels[MPI.Query_thread()],
        loaded_path(),
    )


def named(version: str) -> str:
    """Return name and version from the library's version text, such as MPICH 5.0.2."""
    first = version.split("\n")[0].rstrip("\0").split(", package")[0].strip()
    return re.sub(r"\s+Version\s*:\s*", " ", first)


def loaded_path() -> str:
    """Return the path of the libmpi that this process has mapped; "" before MPI is loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi" in line}
    return min(paths, key=len, default="")


def cuda_awareness(path: str, environ: Mapping[str, str]) -> Awareness:
    """Query the library at `path` through ctypes; without a query function, trust PROMISES.

    Open MPI: MPIX_Query_cuda_support(). MPICH: MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA = 0,
    &flag).
    """
    if not path:
        return Awareness(False, "no libmpi is loaded")
    handle = ctypes.CDLL(path)
    if hasattr(handle, "MPIX_Query_cuda_support"):
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
