"""The simulator engine: loads kernels built for the CPU and launches them on NumPy arrays."""

import ctypes as c
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mpitrain.errors import KernelError
from mpitrain.kernels.loader import BOX_COLUMNS, H100, Argument, Dims, TensorMap, map_pitches
from mpitrain.kernels.simulator.build import Build, build_kernels, build_runtime
from mpitrain.kernels.source import Signature, SourceFile
from mpitrain.machine.compiling import cache_of, loaded

POISON = 0xFF  # this byte repeated is a NaN in every float type


class Buffer(c.Structure):
    """One array for the runtime; the same fields as struct Buffer of runtime.h."""

    _fields_ = [
        ("base", c.c_void_p),
        ("nbytes", c.c_size_t),
        ("element_bytes", c.c_uint),
        ("readonly", c.c_uint),
        ("fresh", c.c_uint),
        ("member", c.c_void_p),
        ("name", c.c_char_p),
        ("bytes_read", c.c_ulonglong),
        ("bytes_written", c.c_ulonglong),
        ("accesses", c.c_ulonglong),
        ("sectors", c.c_ulonglong),
    ]


class _TensorMap(c.Structure):
    """The same fields as struct TensorMap of hopper.h, which has 128 bytes."""

    _fields_ = [
        ("array", c.c_void_p),
        ("inner", c.c_longlong),
        ("outer", c.c_longlong),
        ("sequences", c.c_longlong),
        ("pitch", c.c_longlong),
        ("sequence_pitch", c.c_longlong),
        ("box_inner", c.c_uint),
        ("box_outer", c.c_uint),
        ("element_bytes", c.c_uint),
        ("rest", c.c_char * 68),
    ]


def _aligned(structure: c.Structure, alignment: int) -> Any:
    """Return a copy of a structure that begins at a multiple of `alignment` bytes."""
    size = c.sizeof(structure)
    memory = (c.c_ubyte * (size + alignment))()
    copy = type(structure).from_buffer(memory, -c.addressof(memory) % alignment)
    c.memmove(c.byref(copy), c.byref(structure), size)
    return copy


class _Guarded(c.Structure):
    _fields_ = [("base", c.c_void_p), ("map", c.c_void_p), ("mapped", c.c_size_t)]


class _Copy(NamedTuple):
    """An array, its copy in guarded memory, and the objects that the copy needs to stay alive."""

    array: np.ndarray
    twin: np.ndarray
    memory: _Guarded
    buffer: Buffer
    alive: Any


def _extent(array: np.ndarray) -> tuple[int, int]:
    """Return the first address, and the bytes to the last element, with the gaps of a view."""
    if array.size == 0:
        return array.ctypes.data, 0
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def _refuse_overlap(kernel: str, name: str, array: np.ndarray, other: _Copy) -> None:
    if np.may_share_memory(array, other.array) and np.shares_memory(array, other.array):
        raise KernelError(
            f"{kernel}: arguments {other.buffer.name.decode()} and `{name}` overlap in part; one is written.",
            "Pass the same array twice for work in place, or arrays that share no element.",
        )


def _copy_in(
    runtime: c.CDLL, name: str, argument: Argument, readonly: bool, checked: bool
) -> _Copy:
    array = argument.array
    low, nbytes = _extent(array)
    memory = _Guarded()
    runtime.simulator_allocate(c.c_size_t(nbytes), c.c_size_t(low % 16), c.byref(memory))
    block = (
        np.frombuffer((c.c_ubyte * nbytes).from_address(memory.base), np.uint8)
        if nbytes
        else np.empty(0, np.uint8)
    )
    block.fill(POISON)
    twin = np.ndarray(
        array.shape, array.dtype, block, array.ctypes.data - low if nbytes else 0, array.strides
    )
    if not argument.fresh:
        twin[...] = array
    member = None
    if checked and not array.flags.c_contiguous:
        member = np.zeros(nbytes // array.itemsize, np.uint8)
        steps = tuple(step // array.itemsize for step in array.strides)
        np.ndarray(
            array.shape, np.uint8, member, (array.ctypes.data - low) // array.itemsize, steps
        )[...] = 1
    buffer = Buffer(
        memory.base,
        nbytes,
        array.itemsize,
        readonly,
        argument.fresh,
        None if member is None else member.ctypes.data,
        name.encode(),
    )
    return _Copy(array, twin, memory, buffer, member)


@contextmanager
def guarded(
    runtime: c.CDLL, signature: Signature, arguments: list[Any], checked: bool
) -> Iterator[tuple[list, list]]:
    """Copy the arrays in, yield (buffers, one C value per argument), and copy written arrays back.

    An array passed twice stays one array. After an error nothing is copied back.
    """
    copies: list[_Copy] = []
    cells: list[Any] = []
    try:
        for parameter, argument in zip(signature.parameters, arguments, strict=True):
            if isinstance(argument, TensorMap):
                copy = _copy_in(
                    runtime, f"`{parameter.name}`", Argument(argument.array), True, checked
                )
                copies.append(copy)
                twin = copy.twin if copy.twin.ndim == 3 else copy.twin[None]
                extents = twin.ctypes.data, *reversed(twin.shape), *map_pitches(twin)
                cells.append(
                    _aligned(
                        _TensorMap(*extents, BOX_COLUMNS, argument.box_rows, twin.itemsize), 64
                    )
                )
                continue
            if not parameter.is_pointer:
                cells.append(c.create_string_buffer(argument.tobytes(), argument.nbytes))
                continue
            array = argument.array
            if array is None:
                cells.append(c.c_void_p())
                continue
            same = next(
                (
                    copy
                    for copy in copies
                    if copy.array.__array_interface__ == array.__array_interface__
                ),
                None,
            )
            if same is not None:
                same.buffer.readonly &= parameter.is_readonly
            else:
                for other in copies:
                    if not (parameter.is_readonly and other.buffer.readonly):
                        _refuse_overlap(signature.name, parameter.name, array, other)
                same = _copy_in(
                    runtime, f"`{parameter.name}`", argument, parameter.is_readonly, checked
                )
                copies.append(same)
            first = same.twin.ctypes.data if array.size else same.memory.base
            cells.append(c.c_void_p(first))
        yield [copy.buffer for copy in copies], cells
        for copy in copies:
            if not copy.buffer.readonly:
                copy.array[...] = copy.twin
    finally:
        for copy in copies:
            runtime.simulator_free(c.byref(copy.memory))


NO_LOAD = "Set XDG_CACHE_HOME to a folder from which the system runs code, or use --device cpu."
ORDERS = ("forward", "reverse", "random")

WAYS_OUT = {
    "race": "Put __syncthreads() between the two, or __syncwarp() within a warp, or make both atomic.",
    "out of bounds": "Guard the access, or check what the launch passed.",
    "uninitialised": "Write it first, and put a barrier between the write and the read.",
    "never written": "Write every element of an output passed as `fresh`, or pass it without.",
    "write to const": "Drop the const, or write elsewhere.",
    "alignment": "Check the address before a vector access; give shared arrays __align__(16).",
    "divergent barrier": "Let every thread of the block reach the same __syncthreads().",
    "warp mask": "Name exactly the lanes that arrive, or let all lanes arrive.",
    "deadlock": "Let every lane of the mask reach the same warp collective.",
    "undefined": "Widen the type, or guard the operation.",
    "cluster": "Launch whole clusters of at most 2 blocks and 1024 threads.",
    "mbarrier": "Make the barrier, then sync; let as many arrive as it was made for.",
    "in flight": "Wait for the copies, or for the products, before their memory is used again.",
    "tile": "Let tiles begin at multiples of 1,024 bytes in shared memory, and boxes have rows of 128.",
    "proxy": "Call proxy_fence() after the stores, then sync.",
    "registers": "Call wgmma_fence() before products, wgmma_commit() and wgmma_wait() after them.",
}


class _Launch(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("call", c.c_void_p),
        ("arguments", c.POINTER(c.c_void_p)),
        ("blocks", c.c_uint * 3),
        ("threads", c.c_uint * 3),
        ("dynamic_shared", c.c_uint),
        ("cluster", c.c_uint),
        ("order", c.c_uint),
        ("seed", c.c_uint),
        ("checked", c.c_uint),
        ("counted", c.c_uint),
        ("buffers", c.POINTER(Buffer)),
        ("buffer_count", c.c_uint),
    ]


class _Report(c.Structure):
    _fields_ = [("kind", c.c_char * 24), ("text", c.c_char * 1024), ("offset", c.c_size_t)]


class _Site(c.Structure):
    _fields_ = [
        ("offset", c.c_size_t),
        ("requests", c.c_ulonglong),
        ("passes", c.c_ulonglong),
        ("least", c.c_ulonglong),
        ("nbytes", c.c_uint),
        ("writes", c.c_uint),
    ]


MOST_SITES = 4096


class SharedAccess(NamedTuple):
    """An instruction that touches shared memory, in one launch.

    where     file and line, if it has bank conflicts; else ""
    nbytes    bytes of each thread
    requests  executions of the instruction by a warp
    passes    passes over the 32 banks; Nsight Compute calls them wavefronts
    least     passes without any bank conflict
    """

    where: str
    writes: bool
    nbytes: int
    requests: int
    passes: int
    least: int


class LaunchTraffic(NamedTuple):
    """The bytes that the threads of one launch read and wrote in global memory, by array.

    accesses  number of loads and stores, of at most 16 bytes each, by array
    sectors   number of 32-byte sectors that the requests of all warps touch, by array
    shared    the instructions that touch shared memory
    """

    kernel: str
    read: dict[str, int]
    written: dict[str, int]
    accesses: dict[str, int]
    sectors: dict[str, int]
    shared: tuple[SharedAccess, ...]


class Simulator:
    """An engine that runs kernels on the CPU, one block after another and one thread at a time.

    checked      whether to look for races, wrong addresses and uninitialised reads (about 30 times
                 slower)
    order        order of the threads between two barriers: forward, reverse, or random from `seed`
    capability   the compute capability that sources see, times ten
    cache        folder of compiled kernels
    traffic      a list that receives the traffic of each launch of a checked build
    """

    name = "simulator"
    takes_plain = False  # it needs `Argument` objects for its checks
    has_wgmma = True  # whatever the capability that sources see
    multiprocessors, multiprocessor = 132, H100  # tilings are chosen as for this GPU
    _one_at_a_time = threading.Lock()  # the runtime has only one set of fibers

    def __init__(
        self,
        checked: bool = False,
        order: Literal["forward", "reverse", "random"] = "forward",
        seed: int = 0,
        capability: int = 80,
        cache: Path | None = None,
        traffic: list[LaunchTraffic] | None = None,
    ):
        self.checked, self.order, self.seed, self.capability, self.traffic = (
            checked,
            order,
            seed,
            capability,
            traffic,
        )
        self.cache = cache or cache_of("simulator")
        self._runtime = loaded(build_runtime(self.cache), NO_LOAD)

    def prepare(self, source: SourceFile, defines: dict[str, str], waits: bool) -> None:
        """Do nothing: to look for libraries that exist would take longer than all but one start."""

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Any:
        checks: Build = "checked" if self.traffic is None else "counted"
        build = checks if self.checked else "fast"
        path = build_kernels(source, defines, build, self.capability, self.cache)
        # Each load makes a CDLL object of its own. Threads that share one would race on `restype`
        # below.
        library = loaded(path, NO_LOAD)
        library.simulator_dynamic_shared.restype = c.c_void_p
        bound = library[f"simulator_bound_{signature.name}"]()
        cluster = library[f"simulator_cluster_{signature.name}"]()
        return partial(self._launch, path, library, signature, bound, cluster)

    def tensor_map(self, array: Any, box_rows: int) -> TensorMap:
        """Return the map of an array.    raises  KernelError for those that a driver refuses"""
        if any(place % 16 for place in (array.ctypes.data, *map_pitches(array))):
            raise KernelError(
                f"An array of {array.shape} with strides of {array.strides} bytes has rows off multiples of 16 bytes.",
                "The copy engine takes rows that begin at them: choose a tile of another kernel.",
            )
        return TensorMap(array, box_rows)

    def multiply(
        self, a: Any, b: Any, c: Any, transposed_a: bool, transposed_b: bool, accumulate: bool
    ) -> None:
        wide = np.float64 if a.dtype == np.float64 else np.float32
        left, right = (
            array.astype(wide, copy=False)
            for array in (a.T if transposed_a else a, b.T if transposed_b else b)
        )
        product = left @ right
        c[...] = c + product if accumulate else product

    def _launch(
        self,
        path: Path,
        library: c.CDLL,
        signature: Signature,
        bound: int,
        cluster: int,
        grid: Dims,
        block: Dims,
        arguments: list[Any],
        shared: int,
    ) -> None:
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        threads = block[0] * block[1] * block[2]
        if threads > bound:
            raise KernelError(
                f"{signature.name} is launched with {threads} threads a block; its launch bounds say {bound}.",
                "Use smaller blocks, or raise __launch_bounds__.",
            )
        report = _Report()
        with (
            self._one_at_a_time,
            guarded(self._runtime, signature, arguments, self.checked) as (buffers, cells),
        ):
            counted = (Buffer * (len(buffers) + 1))(*buffers)
            launch = _Launch(
                signature.name.encode(),
                c.cast(library[f"simulator_call_{signature.name}"], c.c_void_p),
                (c.c_void_p * (len(cells) + 1))(*[c.addressof(cell) for cell in cells]),
                grid,
                block,
                shared,
                cluster,
                ORDERS.index(self.order),
                self.seed,
                self.checked,
                self.checked and self.traffic is not None,
                counted,
                len(buffers),
            )
            dynamic_shared = c.c_void_p(library.simulator_dynamic_shared())
            if self._runtime.simulator_launch(c.byref(launch), dynamic_shared, c.byref(report)):
                raise self._error(path, signature, report)
            if self.traffic is not None:
                names = [buffer.name.decode().strip("`") for buffer in buffers]
                moved = list(zip(names, counted, strict=False))
                self.traffic.append(
                    LaunchTraffic(
                        signature.name,
                        {name: buffer.bytes_read for name, buffer in moved},
                        {name: buffer.bytes_written for name, buffer in moved},
                        {name: buffer.accesses for name, buffer in moved},
                        {name: buffer.sectors for name, buffer in moved},
                        self._shared(path),
                    )
                )

    def _shared(self, path: Path) -> tuple[SharedAccess, ...]:
        sites = (_Site * MOST_SITES)()
        count: int = self._runtime.simulator_sites(sites, c.c_size_t(MOST_SITES))
        return tuple(
            SharedAccess(
                _source_line(path, site.offset) if site.passes > site.least else "",
                bool(site.writes),
                site.nbytes,
                site.requests,
                site.passes,
                site.least,
            )
            for site in sorted(sites[:count], key=lambda site: site.offset)
        )

    def _error(self, path: Path, signature: Signature, report: _Report) -> KernelError:
        place = f", {_source_line(path, report.offset)}" if report.offset else ""
        kind = report.kind.decode()
        text = re.sub(
            r"shared memory \+ (\d+) bytes",
            lambda m: _shared_array(path, int(m[1])),
            report.text.decode(),
        )
        return KernelError(f"{kind} in {signature.name}{place}: {text}.", WAYS_OUT[kind])


def _ask(*command: str) -> str:
    """Return the output of a tool of binutils, which comes with g++; nothing without it."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@cache
def _source_line(path: Path, offset: int) -> str:
    line = _ask("addr2line", "-e", str(path), hex(offset)) or "unknown line (needs binutils)"
    return line.splitlines()[0].rpartition("/")[2].partition(" (discriminator")[0]


def _shared_array(path: Path, offset: int) -> str:
    """Return the shared array at an offset of the thread-local image: "shared `tile` + 4 bytes"."""
    for line in _ask("readelf", "--symbols", "--wide", "--demangle", str(path)).splitlines():
        match = re.fullmatch(r" *\d+: (\w+) +(\d+) TLS .*? \d+ (?:.*::)?(\w+)", line)
        if match and int(match[1], 16) <= offset < int(match[1], 16) + int(match[2]):
            return f"shared `{match[3]}` + {offset - int(match[1], 16)} bytes"
    return f"shared memory + {offset} bytes"
