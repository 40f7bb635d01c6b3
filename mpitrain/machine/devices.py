"""The backend of each kind of device: host memory, GPU memory, or a simulated GPU's memory."""

import platform
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from mpitrain.errors import ConfigError
from mpitrain.machine.backend import Backend, HostBackend
from mpitrain.machine.cuda import CudaBackend
from mpitrain.machine.events import Mark, Passed
from mpitrain.machine.kinds import KINDS


class SimulatorBackend(HostBackend):
    """Backend of NumPy arrays for kernels compiled for the CPU; a launch has ended when it returns.

    raises  ConfigError if there is no compiler for them
    """

    kind = "cuda-sim"

    def __init__(self) -> None:
        compiler()

    def mark(self) -> Mark:
        return Passed(time.perf_counter())


def compiler(
    use: str = "device.kind cuda-sim compiles kernels", instead: str = "use --device cpu"
) -> str:
    """Return the path of g++, else of zig, which compile kernels for the simulator and passes for
    the host.

    use, instead  its use and the way to avoid it, for the error
    raises        ConfigError if both are missing or the machine is not x86-64
    """
    path, machine, ziglang = shutil.which("g++"), platform.machine(), find_spec("ziglang")
    if path is None and ziglang and ziglang.origin:
        path = shutil.which(Path(ziglang.origin).with_name("zig"))
    if machine != "x86_64" or path is None:
        missing = f"this machine is {machine}" if machine != "x86_64" else "there is no g++ here"
        raise ConfigError(
            f"{use} with g++ 11 or later on x86-64, but {missing}.",
            f"Install g++ on an x86-64 machine (apt install g++, or pip install ziglang), or {instead}.",
        )
    return path


def has_compiler() -> bool:
    """Return whether `compiler` has an answer."""
    try:
        return bool(compiler())
    except ConfigError:
        return False


BACKENDS: dict[str, Callable[[], Backend]] = {
    backend.kind: backend for backend in (HostBackend, SimulatorBackend, CudaBackend)
}


def backend_for(kind: str) -> Backend:
    """Return the backend of a resolved device.kind.

    raises  ConfigError for an unknown kind, or if this machine lacks the software or the GPU for it
    """
    if kind not in KINDS:
        raise ConfigError(
            f"There is no device of kind {kind!r} to compute on.",
            f"Name one of {', '.join(KINDS)}.",
        )
    return BACKENDS[kind]()
