"""Meters of a host: the energy of its processors (RAPL) and GPUs (NVML), and the state of its GPUs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

POWERCAP = Path("/sys/class/powercap")


class Meter(NamedTuple):
    """A counter of joules, which begins again at 0 when it reaches `wraps_at`.

    read  raises OSError or ValueError where the meter fails
    """

    read: Callable[[], float]
    wraps_at: float = inf


class Energy:
    """The energy that some parts of this host use.

    parts  {name of a part: its meter}
    """

    def __init__(self, parts: Mapping[str, Meter]):
        self.parts = parts
        self._before = self._now()

    def since(self) -> float | None:
        """Return the joules of all parts since the last call, or since this object was made.

        None from the first meter that cannot be read, or is set back, on: a part is never left out.
        """
        before, self._before = self._before, self._now()
        if before is None or self._before is None:
            self._before = None
            return None
        joules = 0.0
        for name, meter in self.parts.items():
            used = self._before[name] - before[name]
            joules += used if used >= 0 else used + meter.wraps_at
        if not isfinite(joules):  # a driver that was loaded again
            self._before = None
            return None
        return joules

    def _now(self) -> dict[str, float] | None:
        try:
            return {name: meter.read() for name, meter in self.parts.items()}
        except (OSError, ValueError):
            return None


def energy_here(gpus: Iterable[str] = (), powercap: Path = POWERCAP) -> Energy | None:
    """Return the energy of all processors of this host, and of the GPUs at these PCI addresses.

    None if one of the GPUs has no meter or, without GPUs, no processor has one that may be read:
    often only root may.
    """
    parts = {}
    for address in dict.fromkeys(gpus):
        if (meter := _of_gpu(address)) is None:
            return None
        parts[f"GPU {address}"] = meter
    parts |= _of_processors(powercap)
    return Energy(parts) if parts else None


def energy_of(places: Sequence[tuple[str, str, str]]) -> Energy | None:
    """Return the energy of the host of all ranks, as `energy_here` does.

    None also if there are several hosts: this one has no meter of the others.

    places  by rank: host, PCI address of the GPU and its UUID
    """
    if len({host for host, _, _ in places}) > 1:
        return None
    return energy_here(address for _, address, _ in places if address)


def _of_processors(powercap: Path) -> dict[str, Meter]:
    meters = {}
    for zone in sorted(powercap.glob("*-rapl:*")):  # of Intel; AMD's processors have the same
        with suppress(OSError, ValueError):
            name = (zone / "name").read_text().strip()
            read = _microjoules(zone / "energy_uj")
            read()
            if name.startswith("package"):  # which includes its cores
                meters[name] = Meter(read, int((zone / "max_energy_range_uj").read_text()) / 1e6)
    return meters


def _microjoules(path: Path) -> Callable[[], float]:
    return lambda: int(path.read_text()) / 1e6


def nvml() -> Any:
    """Return the module pynvml, ready for use; None without it or without a driver."""
    try:
        module: Any = import_module("pynvml")
        module.nvmlInit()
    except Exception:  # ImportError, or an error of a class that only the module knows
        return None
    return module


def _of_gpu(address: str) -> Meter | None:
    if (module := nvml()) is None:
        return None

    def read() -> float:
        try:
            return module.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except module.NVMLError as error:
            raise OSError(str(error)) from error

    try:
        handle = module.nvmlDeviceGetHandleByPciBusId(address)
        read()
    except (module.NVMLError, OSError):  # before Volta there is no meter
        return None
    return Meter(read)


class GpuState(NamedTuple):
    """The state of a GPU; None is what it does not have.

    clock, most   of its multiprocessors, in MHz: now, and at most
    memory_errors  errors of its memory that ECC could not correct, since the driver was loaded
    link_errors   transfers over PCI Express and NVLink that were repeated
    problem       why the GPU cannot be asked, as "GPU is lost"; else ""
    """

    name: str
    clock: int | None = None
    most: int | None = None
    memory_errors: int | None = None
    link_errors: int | None = None
    problem: str = ""


def gpu_states() -> list[GpuState]:
    """Return the state of each GPU of this host; empty where NVML cannot be used."""
    if (module := nvml()) is None:
        return []
    try:
        count = module.nvmlDeviceGetCount()
    except module.NVMLError as error:
        return [GpuState("every GPU", problem=str(error))]
    states = []
    for index in range(count):
        name = f"GPU {index}"
        try:
            states.append(_state(module, name, module.nvmlDeviceGetHandleByIndex(index)))
        except module.NVMLError as error:
            states.append(GpuState(name, problem=str(error)))
    return states


def _state(module: Any, name: str, handle: Any) -> GpuState:
    def asked(function: str, *words: Any) -> int | None:
        try:
            return int(getattr(module, function)(handle, *words))
        except module.NVMLError as error:
            if error.value == module.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    replay, ecc = module.NVML_NVLINK_ERROR_DL_REPLAY, module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    counts = [asked("nvmlDeviceGetPcieReplayCounter")]
    for link in range(module.NVML_NVLINK_MAX_LINKS):
        counts.append(asked("nvmlDeviceGetNvLinkErrorCounter", link, replay))
    known = [count for count in counts if count is not None]
    return GpuState(
        name,
        asked("nvmlDeviceGetClockInfo", module.NVML_CLOCK_SM),
        asked("nvmlDeviceGetMaxClockInfo", module.NVML_CLOCK_SM),
        asked("nvmlDeviceGetTotalEccErrors", ecc, module.NVML_VOLATILE_ECC),
        sum(known) if known else None,
    )
