"""NVRTC through CuPy: compiles a source to machine code for one architecture, cached on disk.

It needs no GPU. CuPy's own compilation does not support architectures such as sm_90a. Their
instructions (wgmma, setmaxnreg) exist on one chip only. Several processes may compile the same
source at once: a file gets its final name only when it is complete.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from mpitrain.errors import ConfigError, KernelError
from mpitrain.kernels.compiling import compiling
from mpitrain.kernels.source import SourceFile

OPTIONS = ("--std=c++17", "-default-device")
"""The options for every source. Subnormal numbers are not flushed to 0: host and GPU agree on them.

Without -default-device, NVRTC up to 13.0 takes a lambda with a parameter `auto` for a host
function.
"""


@contextmanager
def own_locale() -> Iterator[None]:
    """Restore this thread's locale afterwards.

    NVRTC 12.2 leaves the locale "C" behind, in which Python opens files as ASCII.
    """
    use = ctypes.CDLL(None).uselocale
    use.restype, use.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = use(None)
    try:
        yield
    finally:
        use(before)


def architecture(capability: int, known: Sequence[int]) -> str:
    """Return the architecture that NVRTC compiles for.

    From 9.0 on, this is the variant with features that only this chip has (sm_90a).
    capability  of the device, times ten
    known       capabilities that this NVRTC knows; for a newer device, the driver translates the
                newest one's PTX
    """
    if capability > max(known):
        return f"compute_{max(known)}"
    return f"sm_{capability}{'a' * (capability >= 90)}"


class Compiler:
    """A compiler of sources for one device.

    cupy        the module
    capability  of the device, times ten
    folder      of the compiled files
    """

    def __init__(self, cupy: ModuleType, capability: int, folder: Path):
        """Load NVRTC.

        raises  ConfigError without NVRTC, or if the driver is too old for its code
        """
        self._cupy, self._folder = cupy, folder
        try:
            self._version = cupy.cuda.nvrtc.getVersion()
        except RuntimeError as error:
            # CuPy loads the library at first use, and its wheels do not contain it.
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"Kernels are compiled by NVRTC, but CuPy cannot load it: {reason}",
                "Install it: pip install 'mpitrain[cuda13]', or [cuda12].",
            ) from None
        driver = cupy.cuda.runtime.driverGetVersion()
        if self._version[0] > driver // 1000:
            raise ConfigError(
                "NVRTC {}.{} compiles for newer drivers than the one here, which is of CUDA {}.{}.".format(
                    *self._version, driver // 1000, driver % 1000 // 10
                ),
                "CuPy takes the newest NVRTC that is installed: uninstall nvidia-cuda-nvrtc, or update the driver.",
            )
        self.architecture = architecture(capability, cupy.cuda.nvrtc.getSupportedArchs())
        """The architecture, as in NVRTC's option."""

    def compile(self, source: SourceFile, defines: Mapping[str, str]) -> Path:
        """Return the file of the machine code, or of PTX for a device newer than NVRTC.

        raises  KernelError with NVRTC's messages
        """
        macros = tuple(f"-D{macro}={value}" for macro, value in defines.items())
        options = (f"-arch={self.architecture}", *OPTIONS, *macros)
        key = hashlib.sha256(repr((source.text, options, self._version)).encode()).hexdigest()[:32]
        is_code = self.architecture.startswith("sm_")
        path = self._folder / f"{source.path.stem}-{key}.{'cubin' if is_code else 'ptx'}"
        if not path.exists():
            # These options name the folders of CUDA's and CuPy's headers. The key omits them,
            # because they differ between machines.
            headers = tuple(self._cupy._core.core.assemble_cupy_compiler_options(()))
            self._write(
                path,
                self._compiled(
                    source,
                    (*options, *(option for option in headers if option.startswith("-I"))),
                    is_code,
                ),
            )
        return path

    def _compiled(self, source: SourceFile, options: tuple[str, ...], is_code: bool) -> bytes:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(source.text, source.path.name, (), ())
        try:
            with compiling(source.path.name), own_locale():
                nvrtc.compileProgram(program, options)
            # CuPy drops the last byte, as the end of a text. For machine code, the 0 restores it.
            return nvrtc.getCUBIN(program) + b"\0" if is_code else nvrtc.getPTX(program)
        except nvrtc.NVRTCError:
            raise KernelError(
                f"NVRTC cannot compile {source.path.name} for {self.architecture}:\n{nvrtc.getProgramLog(program)}",
                "CuPy and its CUDA headers must be of one version: reinstall mpitrain[cuda13] or [cuda12].",
            ) from None
        finally:
            nvrtc.destroyProgram(program)

    def _write(self, path: Path, code: bytes) -> None:
        descriptor, partial = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        Path(partial).replace(path)
