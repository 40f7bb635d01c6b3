"""The software and hardware of this machine as lines, and problems with cores, threads and shared memory."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import __version__
from mpitrain.errors import ConfigError
from mpitrain.machine import blas_kernels, process
from mpitrain.machine.blas_kernels import NAMES
from mpitrain.machine.process import KINDS, processor, room_for
from mpitrain.transport.base import Transport

SMALL_SHM = 64 << 20
"""Bytes of /dev/shm in a container by default: too few for ranks that share memory."""
MKL = "mkl"
"""An optional library of `uses` that is not a Python module."""


class Facts(NamedTuple):
    """The environment of one rank.

    host        its name
    machine     boot identifier of the kernel; namespaces and containers of one machine share it
    cores       cores that it may use
    processors  number of cores of its host
    processor   name of the processor; ranks with the same processor compute the same bits
    blas        name, version and kernels of NumPy's BLAS
    threads     BLAS threads
    shared      free bytes of /dev/shm
    memory      free bytes of main memory
    kinds       values of --device that it can use; `look` fills it in, and what follows
    rates       {library: float32 operations per second}, measured while all ranks multiply
    kernels     what multiplies in a run, and why; empty where there is no choice
    """

    host: str
    machine: str
    cores: list[int]
    processors: int
    processor: str
    blas: str
    threads: int
    shared: int
    memory: int
    kinds: Sequence[str] = ()
    rates: dict[str, float] = {}
    kernels: str = ""


def facts_here(host: str) -> Facts:
    """Return the facts about this rank that need no measurement."""
    blas, threads = _blas()
    return Facts(
        host,
        process.machine(),
        process.own_cores(),
        process.processors(),
        processor().name,
        blas,
        threads,
        process.shared_memory(),
        process.free_memory("cpu"),
    )


def look(host: str) -> Facts:
    """Return all facts about this rank. All ranks measure their matrix products at the same time."""
    from mpitrain.tools.bench.kernels.host_products import rates

    return facts_here(host)._replace(kinds=_kinds(), rates=rates(), kernels=_kernels())


def of_all(transport: Transport, look: Callable[[str], Facts]) -> list[Facts]:
    """Return the facts about every rank, by rank. Collective.

    look  (name of this rank's host) -> its facts
    """
    own = look(transport.hosts[transport.rank])
    return [Facts(*values) for values in transport.gather_text(own)]


def facts(everyone: list[Facts], aware: Any) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report as (name, value).

    everyone  the environment of each rank
    aware     the `Awareness` of the MPI library
    """
    from importlib.metadata import version

    import numpy

    from mpitrain.tools.bench.kernels.host_products import described
    from mpitrain.transport.library import (
        BEYOND,
        family_of,
        lacking,
        launcher_of,
        library,
        ucx_line,
    )

    mpi, started = library(), process.launched()
    yield "mpitrain", f"{__version__}, Python {platform.python_version()} ({sys.executable})"
    yield (
        "MPI",
        f"{mpi.version}, standard {'.'.join(map(str, mpi.standard))}, through mpi4py {version('mpi4py')}",
    )
    abi = (
        f"ABI {mpi.abi[0]}.{mpi.abi[1]} of the MPI Forum" if mpi.abi[0] > 0 else "ABI of its family"
    )
    yield "", f"{mpi.path or 'library path unknown'}, {abi}, thread level {mpi.thread_level}"
    if family_of(mpi.version):
        try:
            yield "launcher", launcher_of(mpi.version, mpi.path)
        except ConfigError as error:
            yield "launcher", f"none: {error.law}"
    for name in lacking(mpi.path) if mpi.path else ():
        yield "", f"without {name}: {BEYOND[name].without}"
    yield "CUDA-aware", f"{'yes' if aware.cuda else 'no'}, {aware.how}"
    if ucx := ucx_line(process.environment()):
        yield "UCX", ucx
    yield "GPUs", gpus()
    first = everyone[0]
    yield "BLAS", f"{first.blas}, {first.threads} thread(s) per rank, NumPy {numpy.__version__}"
    is_by_mkl = process.blas_kernels() == process.MKL
    yield "products", described(first.rates, is_by_mkl, processor().gains_from_mkl)
    if first.kernels:
        yield "", first.kernels
    yield "compiler", _compiler()
    usable = extras()
    listed = {module: f"{module} ({use})" for module, use in uses().items()}
    absent = [text for module, text in listed.items() if module not in usable]
    yield "extras", ", ".join(listed[module] for module in listed if module in usable) or "none"
    yield "not here", ", ".join(absent) or "nothing"
    by = f"{started.size} started by {started.launcher}"
    by = "started by hand" if started.launcher == "none" else by
    hosts = by_host(everyone)
    yield "ranks", f"{len(everyone)} on {len(hosts)} host(s), {by}"
    for host, ranks in hosts.items():
        shares = f"{len(ranks)} rank(s), {share_of_cores([rank.cores for rank in ranks])}"
        memory, shared = ranks[0].memory / 1e9, ranks[0].shared / 1e9
        free = f"{memory:.1f} GB of memory, {shared:.1f} GB in /dev/shm"
        yield "host", f"{host}: {shares}; free: {free}"


def uses() -> dict[str, str]:
    from mpitrain.data import SOURCES

    return {
        "matplotlib": "pictures",
        "bokeh": "pages of reports",
        **{row.module: f"data.source={name}" for name, row in SOURCES.items() if row.module},
        "tokenizers": "data prepare",
        "torch": "compare --peer torch",
        MKL: "faster products on Intel processors",
        "cupy": "--device cuda",
    }


def extras() -> set[str]:
    """Return the modules in `uses` that can be used. MKL can if its library loads."""
    from mpitrain.ops.host.product import installed_mkl

    return {m for m in uses() if (installed_mkl() if m == MKL else find_spec(m))}


def share_of_cores(sets: list[list[int]]) -> str:
    """Say whether the ranks of one host have cores of their own or share them.

    sets  cores of each rank
    """
    together = len(set().union(*sets))
    if sum(map(len, sets)) == together:
        return f"{', '.join(sorted({str(len(cores)) for cores in sets}))} core(s) of its own each"
    return f"{together} core(s) that they share"


def verdict(
    everyone: list[Facts],
    started: process.Launched,
    problems: Sequence[str] = (),
    is_refused: bool = False,
) -> Iterator[str]:
    """Yield the lines of the verdict: devices that can be used, then each problem with its remedy.

    problems    found by the probes
    is_refused  whether the ranks loaded different MPI libraries
    """
    faults = [*warnings(everyone, started), *problems]
    kinds = [kind for kind in everyone[0].kinds if all(kind in rank.kinds for rank in everyone)]
    if started.size > len(everyone) or is_refused:
        yield "verdict      this start does not work:"
    else:
        wrong = f"{len(faults)} thing(s) will go wrong:" if faults else "no problem was found."
        yield f"verdict      {len(everyone)} rank(s) can train with --device {' or '.join(kinds)}; {wrong}"
    yield from (f"warning: {warning}" for warning in faults)


def warnings(everyone: list[Facts], started: process.Launched) -> Iterator[str]:
    if started.size > len(everyone):
        yield (
            f"{started.launcher} started {started.size} processes, but MPI tells each that it is alone; they would all "
            "write the same files. Use the launcher of the MPI named above: `mpitrain launch` finds it."
        )
    for host, ranks in by_host(everyone).items():
        sets = {frozenset(rank.cores) for rank in ranks}
        cores = len(union := frozenset().union(*sets))
        for allowed in (union, *sorted(sets, key=sorted)):
            within = sum(allowed.issuperset(rank.cores) for rank in ranks)
            if within > len(allowed):
                yield _crowded(host, within, len(allowed), ranks[0].processors)
                break
        else:
            if sum(rank.threads for rank in ranks) > cores:
                yield (
                    f"{len(ranks)} ranks on {host} use {ranks[0].threads} BLAS threads each, more than its {cores} cores. "
                    "Unset OMP_NUM_THREADS and OPENBLAS_NUM_THREADS, or set them lower."
                )
        if len(ranks) > 1 and (short := small_shm(ranks, SMALL_SHM)):
            yield (
                f"{short}: ranks of one host share memory there. "
                "In a container, start it with --shm-size=1g."
            )


def small_shm(ranks: Sequence[Facts], least: float) -> str:
    """Return what is wrong with /dev/shm of the host of these ranks; "" if enough is free.

    least  more bytes than these must be free; the ranks may need still more
    """
    free, least = min(rank.shared for rank in ranks), max(least, room_for(0, len(ranks)))
    if free > least:
        return ""
    return f"/dev/shm of {ranks[0].host} has {free / 1e6:.0f} MB free, and needs more than {least / 1e6:.4g} MB"


def _crowded(host: str, ranks: int, allowed: int, cores: int) -> str:
    if allowed == cores:
        return (
            f"{host} has {cores} cores for {ranks} ranks: they take turns, and timings mean little. "
            f"Start at most {cores} ranks there."
        )
    return (
        f"{host} has {cores} cores, but {ranks} ranks may run on {allowed} of them only: they take turns, and timings mean "
        "little. Start without taskset, with --bind none, or with more cores of the batch job or container."
    )


def by_host(everyone: Sequence[Facts]) -> dict[str, list[Facts]]:
    return {
        host: [rank for rank in everyone if rank.host == host]
        for host in dict.fromkeys(rank.host for rank in everyone)
    }


def _kinds() -> list[str]:
    from mpitrain.ops.device import backend_for

    usable: list[str] = []
    for kind in KINDS:
        with suppress(ConfigError):
            backend_for(kind)
            usable.append(kind)
    return usable


def _compiler() -> str:
    from mpitrain.machine.compiling import NO_COMPILER, compiler, is_zig
    from mpitrain.ops.host.compiled import lacks

    if reason := lacks("float32"):
        without = "the passes are NumPy's, and --device cuda-sim cannot run"
        return (
            f"none: {without}"
            if reason == NO_COMPILER
            else f"fails: the passes are NumPy's. {reason}"
        )
    version = [compiler(), *(["c++"] if is_zig() else []), "--version"]
    said = subprocess.run(version, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"{Path(compiler()).name}: {said.stdout.partition(chr(10))[0]}"


def gpus() -> str:
    """Return the GPUs that nvidia-smi lists, as text, and whether CuPy can use them."""
    if not shutil.which("nvidia-smi"):
        return "none (there is no nvidia-smi); everything else works without"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    if not listed.stdout.strip():
        return f"none ({(listed.stderr.strip() or 'nvidia-smi lists nothing').splitlines()[0]})"
    return f"{listed.stdout.strip()}\n{'':<13}{_cupy()}"


def _cupy() -> str:
    from mpitrain.ops.device import backend_for

    try:
        backend_for("cuda")
    except ConfigError as error:
        return f"{error.law} {error.way_out}"
    return f"CuPy uses {process.gpus()} of them"


def _kernels() -> str:
    """Describe what multiplies; the first rank of each host compares it with others anew."""
    kernels = process.blas_kernels()
    process.choose_blas_kernels("")
    try:
        if not blas_kernels.is_choice():
            by_hand = process.BY_MKL if kernels == process.MKL else process.OPENBLAS_KERNELS
            return kernels and f"{kernels}, by {by_hand}"
        before = blas_kernels.measured()
        now = blas_kernels.measured(anew=process.launched().local_rank == 0)
    finally:
        process.choose_blas_kernels(kernels)
    if kernels == now.kernels:
        return str(now)
    if kernels == before.kernels:
        return f"{now}: from the next start on"
    return f"{kernels or NAMES['']}, by a user's choice; measured: {now}"


def _blas() -> tuple[str, int]:
    import numpy  # noqa: F401 (threadpoolctl finds only libraries that are loaded)
    from threadpoolctl import threadpool_info

    # Others may be loaded as well, such as MKL. NumPy's wheels have theirs in numpy.libs.
    for pool in sorted(threadpool_info(), key=lambda pool: "numpy" not in pool["filepath"]):
        if pool["user_api"] == "blas":
            named = [
                str(pool.get(key) or "") for key in ("internal_api", "version", "architecture")
            ]
            return " ".join(filter(None, named)), pool["num_threads"]
    return "unknown", 1
