"""NVIDIA's runtime compiler through ctypes: needs its wheels (extra `test`), and neither a GPU nor a driver."""

import ctypes as c
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from mpitrain.kernels.source import SourceFile


class Usage(NamedTuple):
    """What ptxas says of one kernel: registers a thread, spilled and shared bytes."""

    registers: int
    spilled: int
    shared: int


def _wheels() -> Path:
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(Path(folder) / "cu13" for folder in folders if (Path(folder) / "cu13" / "lib").is_dir())


class Compiler:
    """Compiles sources as CuPy's RawModule does, which has numbers below the smallest normal one taken for 0."""

    def __init__(self) -> None:
        self._root = _wheels()
        self._library = c.CDLL(str(next((self._root / "lib").glob("libnvrtc.so.*"))))

    def compile(self, source: SourceFile, architecture: str, defines: dict[str, object]) -> tuple[bytes, str]:
        """(cubin or PTX, log); sm_80 gives a cubin, compute_80 PTX. AssertionError with the log if it does not compile."""
        program, size = c.c_void_p(), c.c_size_t()
        library = self._library
        library.nvrtcCreateProgram(c.byref(program), source.text.encode(), source.path.name.encode(), 0, None, None)
        options = [f"-arch={architecture}", "--std=c++17", "-ftz=true", f"-I{self._root / 'include'}", "-DNVRTC=1",
                   *(f"-D{macro}={value}" for macro, value in defines.items())]
        if architecture.startswith("sm_"):
            options.append("--ptxas-options=-v")
        failed = library.nvrtcCompileProgram(program, len(options), (c.c_char_p * len(options))(*map(str.encode, options)))
        library.nvrtcGetProgramLogSize(program, c.byref(size))
        log = c.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        text = log.value.decode()
        assert not failed, f"{source.path.name} for {architecture} with {defines}:\n{text}"
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        getattr(library, f"nvrtcGet{kind}Size")(program, c.byref(size))
        result = c.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{kind}")(program, result)
        library.nvrtcDestroyProgram(c.byref(program))
        return result.raw, text


def usages(log: str) -> dict[str, Usage]:
    """Every kernel's resources, from the log of a compilation for an sm_ architecture."""
    pattern = re.compile(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)$",
        re.DOTALL | re.MULTILINE)
    found = {}
    for name, stores, loads, registers, rest in pattern.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Usage(int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0)
    return found
