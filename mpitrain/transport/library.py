"""What the MPI library says about itself: name, thread level, and whether it can read GPU memory."""

import ctypes
import re
from collections.abc import Mapping
from typing import NamedTuple

PROMISES = {
    "MPICH_GPU_SUPPORT_ENABLED": "Cray MPICH",
    "MV2_USE_CUDA": "MVAPICH",
    "I_MPI_OFFLOAD": "Intel MPI",
}
"""Environment variables that make an MPI CUDA-aware without a function to ask it."""


class Library(NamedTuple):
    """Facts about the MPI in use.

    version       its name and version
    standard      version of the MPI standard, such as (3, 1)
    thread_level  single, funneled, serialized or multiple
    path          the shared object that is loaded; "" if it cannot be told
    """

    version: str
    standard: tuple[int, int]
    thread_level: str
    path: str


class Awareness(NamedTuple):
    """Whether messages may lie in GPU memory, and how that was found out. A yes is the library's word, not a proof."""

    cuda: bool
    how: str


def library() -> Library:
    """Ask the MPI that mpi4py loads; starts MPI."""
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


def named(told: str) -> str:
    """Name and version, from all that a library says of itself: Open MPI v5.0.11, MPICH 5.0.2."""
    first = told.split("\n")[0].rstrip("\0").split(", package")[0].strip()
    return re.sub(r"\s+Version\s*:\s*", " ", first)


def loaded_path() -> str:
    """The libmpi that this process has mapped; "" before MPI is loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "/libmpi" in line}
    return min(paths, key=len, default="")


def cuda_awareness(path: str, environ: Mapping[str, str]) -> Awareness:
    """Ask the library at `path` through ctypes; where it has no such function, believe the environment.

    Open MPI: MPIX_Query_cuda_support(). MPICH: MPIX_GPU_query_support(MPIX_GPU_SUPPORT_CUDA = 0, &flag).
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
