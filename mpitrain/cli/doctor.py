"""`mpitrain doctor`: what this machine offers, and what will not work on it."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import click

from mpitrain import __version__, device
from mpitrain.cli.ending import ranks

SMALL_SHM = 64 << 20  # bytes: what containers are given by default, too little for ranks that share memory


@click.command()
def command() -> None:
    """Say what is here: Python, MPI, GPUs, BLAS, ranks and hosts; and warn of what will not work.

    Ask it in the way you will train, for example: mpitrain launch -n 4 -- doctor
    """
    with ranks(allow_alone=True) as transport:
        from mpitrain.transport.proof import cuda_messages

        everyone = transport.gather_text({"cores": device.cores(), "threads": _blas()[1]})
        aware = cuda_messages(transport, "auto")
        if transport.rank == 0 and device.launched().rank == 0:
            for name, value in facts(transport, everyone, aware):
                click.echo(f"{name:<12} {value}")
            for warning in warnings(transport, everyone):
                click.echo(f"warning: {warning}")


def facts(transport: Any, everyone: list[dict[str, int]], aware: Any) -> Iterator[tuple[str, str]]:
    """(name, value) lines."""
    import numpy

    from mpitrain.ops.host.product import mkl
    from mpitrain.transport.library import library

    mpi, started = library(), device.launched()
    yield "mpitrain", f"{__version__}, Python {platform.python_version()} ({sys.executable})"
    yield "MPI", f"{mpi.version}, standard {'.'.join(map(str, mpi.standard))}, through mpi4py {version('mpi4py')}"
    yield "", f"{mpi.path or 'library path unknown'}, thread level {mpi.thread_level}"
    yield "CUDA-aware", f"{'yes' if aware.cuda else 'no'}, {aware.how}"
    yield "GPUs", gpus()
    yield "", _cupy()
    name, threads = _blas()
    yield "BLAS", f"{name}, {threads} thread(s) per rank, NumPy {numpy.__version__}"
    yield "products", "by MKL" if mkl() else "by NumPy's BLAS; on Intel processors `pip install mkl` makes them faster"
    yield "ranks", f"{transport.size} on {len(set(transport.hosts))} host(s); {started.size} started by {started.launcher}"
    for host in dict.fromkeys(transport.hosts):
        here = [rank for rank, other in enumerate(transport.hosts) if other == host]
        yield "host", f"{host}: {len(here)} rank(s), {everyone[here[0]]['cores']} core(s) each may use"
    yield "/dev/shm", f"{shm_free() / 1e9:.1f} GB free"


def warnings(transport: Any, everyone: list[dict[str, int]]) -> Iterator[str]:
    """What will go wrong, and the way out."""
    started = device.launched()
    if started.size > transport.size:
        yield (f"{started.launcher} started {started.size} processes, but MPI tells each that it is alone; they would all "
               "write the same files. Use the launcher of the MPI named above: `mpitrain launch` finds it.")
    cores = os.cpu_count() or 1
    for host in dict.fromkeys(transport.hosts):
        here = [facts for facts, other in zip(everyone, transport.hosts, strict=True) if other == host]
        if len(here) > cores:
            yield f"{host} has {cores} cores for {len(here)} ranks: they take turns, and timings mean little."
        elif sum(facts["threads"] for facts in here) > cores:
            yield (f"{len(here)} ranks on {host} use {here[0]['threads']} BLAS threads each, more than its {cores} cores. "
                   "Unset OMP_NUM_THREADS and OPENBLAS_NUM_THREADS, or set them lower.")
    if shm_free() < SMALL_SHM:
        yield (f"/dev/shm has {shm_free() / 1e6:.0f} MB free: ranks of one host share memory there. "
               "In a container, start it with --shm-size=1g.")


def gpus() -> str:
    """What nvidia-smi lists."""
    if not shutil.which("nvidia-smi"):
        return "none (there is no nvidia-smi)"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listed.stdout.strip() or f"none ({(listed.stderr.strip() or 'nvidia-smi lists nothing').splitlines()[0]})"


def _cupy() -> str:
    """Whether CuPy can use a GPU, and the way out if not."""
    from mpitrain.backend import backend_for
    from mpitrain.errors import ConfigError

    try:
        backend_for("cuda")
    except ConfigError as error:
        return error.law
    return f"CuPy uses {device.gpus()} of them"


def shm_free() -> int:
    """Bytes free in /dev/shm."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0


def _blas() -> tuple[str, int]:
    """NumPy's BLAS and the threads it will use here."""
    import numpy  # noqa: F401 (its BLAS must be loaded to be asked)
    from threadpoolctl import threadpool_info

    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return (f"{found[0]['internal_api']} {found[0]['version']}", found[0]["num_threads"]) if found else ("unknown", 1)
