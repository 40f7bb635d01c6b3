"""NVRTC, asked through CuPy without a GPU: a source becomes machine code for one architecture, kept in this user's folder.

CuPy's own way from source to kernel knows no architecture like sm_90a, whose instructions (wgmma, setmaxnreg) are those of one
chip alone. Several processes may compile the same at once: a file appears under its name when it is whole.
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
from mpitrain.kernels.source import SourceFile

OPTIONS = ("--std=c++17", "-ftz=true", "-default-device")
"""Numbers below the smallest normal one are taken for 0, as CuPy has it in every kernel of its own. To NVRTC up to 13.0, though
to no newer one, a lambda with a parameter `auto` is a function of the host unless what says nothing is for the device.
"""


@contextmanager
def own_locale() -> Iterator[None]:
    """This thread's locale is afterwards what it was: NVRTC 12.2 leaves "C" behind, in which Python opens files as ASCII."""
    use = ctypes.CDLL(None).uselocale
    use.restype, use.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = use(None)
    try:
        yield
    finally:
        use(before)


def architecture(capability: int, known: Sequence[int]) -> str:
    """What NVRTC compiles for: the chip itself, with what it alone can do from 9.0 on, or the newest one that NVRTC knows.

    capability  of the device, times ten
    known       those that this NVRTC knows; for one that is newer than all, the driver translates the newest one's PTX
    """
    if capability > max(known):
        return f"compute_{max(known)}"
    return f"sm_{capability}{'a' * (capability >= 90)}"


class Compiler:
    """Compiles sources for one device.

    cupy        the module
    capability  of the device, times ten
    folder      of what was compiled
    """

    def __init__(self, cupy: ModuleType, capability: int, folder: Path):
        """raises  ConfigError without NVRTC, or if the driver loads nothing of its making."""
        self._cupy, self._folder = cupy, folder
        try:
            self._version = cupy.cuda.nvrtc.getVersion()
        except (
            RuntimeError
        ) as error:  # CuPy loads it when it is first asked for, and its wheels come without
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"Kernels are compiled by NVRTC, but CuPy cannot load it: {said}",
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
        """As NVRTC's option names it."""

    def compile(self, source: SourceFile, defines: Mapping[str, str]) -> Path:
        """The file of the machine code, or of PTX for a device newer than NVRTC.

        raises  KernelError with NVRTC's words
        """
        macros = tuple(f"-D{macro}={value}" for macro, value in defines.items())
        options = (f"-arch={self.architecture}", *OPTIONS, *macros)
        key = hashlib.sha256(repr((source.text, options, self._version)).encode()).hexdigest()[:32]
        is_code = self.architecture.startswith("sm_")
        path = self._folder / f"{source.path.stem}-{key}.{'cubin' if is_code else 'ptx'}"
        if not path.exists():
            # Where the headers of CUDA and CuPy lie. Not in the key: it is another on every machine.
            headers = tuple(self._cupy._core.core.assemble_cupy_compiler_options(()))
            self._write(
                path,
                self._compiled(
                    source,
                    (*options, *(each for each in headers if each.startswith("-I"))),
                    is_code,
                ),
            )
        return path

    def _compiled(self, source: SourceFile, options: tuple[str, ...], is_code: bool) -> bytes:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(source.text, source.path.name, (), ())
        try:
            with own_locale():
                nvrtc.compileProgram(program, options)
            # CuPy takes the last byte for the end of a text. Of machine code it is the last one of its headers, a 0.
            return nvrtc.getCUBIN(program) + b"\0" if is_code else nvrtc.getPTX(program)
        except nvrtc.NVRTCError:
            raise KernelError(
                f"NVRTC cannot compile {source.path.name} for {self.architecture}:\n{nvrtc.getProgramLog(program)}",
                "CuPy and its CUDA headers must be of one version: reinstall mpitrain[cuda13] or [cuda12].",
            ) from None
        finally:
            nvrtc.destroyProgram(program)

    def _write(self, path: Path, code: bytes) -> None:
        """Under its name once whole."""
        descriptor, partial = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        Path(partial).replace(path)
