"""NVRTC, asked through CuPy without a GPU: a source becomes machine code for one architecture, kept in this user's folder.

CuPy's own way from source to kernel knows no architecture like sm_90a, whose instructions (wgmma, setmaxnreg) are those of one
chip alone. Several processes may compile the same at once: a file appears under its name when it is whole.
"""

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType

from mpitrain.errors import KernelError
from mpitrain.kernels.source import SourceFile

OPTIONS = ("--std=c++17", "-ftz=true")
"""Numbers below the smallest normal one are taken for 0, as CuPy has it in every kernel of its own."""


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
        self._cupy, self._capability, self._folder = cupy, capability, folder

    @cached_property
    def architecture(self) -> str:
        """As NVRTC's option names it."""
        return architecture(self._capability, self._cupy.cuda.nvrtc.getSupportedArchs())

    def compile(self, source: SourceFile, defines: Mapping[str, str]) -> Path:
        """The file of the machine code, or of PTX for a device newer than NVRTC.

        raises  KernelError with NVRTC's words
        """
        macros = tuple(f"-D{macro}={value}" for macro, value in defines.items())
        options = (f"-arch={self.architecture}", *OPTIONS, *macros)
        key = hashlib.sha256(repr((source.text, options, self._cupy.cuda.nvrtc.getVersion())).encode()).hexdigest()[:32]
        is_code = self.architecture.startswith("sm_")
        path = self._folder / f"{source.path.stem}-{key}.{'cubin' if is_code else 'ptx'}"
        if not path.exists():
            # Where the headers of CUDA and CuPy lie. Not in the key: it is another on every machine.
            headers = tuple(self._cupy._core.core.assemble_cupy_compiler_options(()))
            self._write(path, self._compiled(source, (*options, *(each for each in headers if each.startswith("-I"))), is_code))
        return path

    def _compiled(self, source: SourceFile, options: tuple[str, ...], is_code: bool) -> bytes:
        nvrtc = self._cupy.cuda.nvrtc
        program = nvrtc.createProgram(source.text, source.path.name, (), ())
        try:
            nvrtc.compileProgram(program, options)
            return nvrtc.getCUBIN(program) if is_code else nvrtc.getPTX(program)
        except nvrtc.NVRTCError:
            raise KernelError(f"NVRTC cannot compile {source.path.name} for {self.architecture}:\n{nvrtc.getProgramLog(program)}",
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
