"""NVIDIA's runtime compiler through ctypes: needs its wheels (extra `test`), and neither a GPU nor a driver."""

import ctypes as c
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from mpitrain.kernels.cuda import OPTIONS, own_locale
from mpitrain.kernels.source import SourceFile


class Usage(NamedTuple):
    """What ptxas says of one kernel: registers a thread, spilled and shared bytes."""

    registers: int
    spilled: int
    shared: int


class Compiled(NamedTuple):
    """What a compilation gives; `code` is a cubin where it was for a real architecture, else as `ptx`."""

    code: bytes
    log: str
    ptx: str

    def accesses(self, kernel: str) -> set[str]:
        """The instructions by which a kernel moves global memory, without the types: "ld 16" for one of 16 bytes."""
        found = re.findall(
            r"\b(ld|st)\.global(?:\.nc)?(?:\.v([24]))?\.[a-z](\d+)", self._body(kernel)
        )
        return {f"{verb} {int(count or 1) * int(bits) // 8}" for verb, count, bits in found}

    @property
    def flushing(self) -> set[str]:
        """The instructions that take or leave 0 for a subnormal number."""
        return set(re.findall(r"\b[a-z]\w*\.(?:\w+\.)*ftz\.\w+", self.ptx))

    @property
    def shared_accesses(self) -> set[int]:
        """Bytes that instructions move to or from shared memory at a time, where that is more than one number."""
        vectors = re.findall(r"(?:ld|st)\.shared\.v([24])\.[a-z](\d+)", self.ptx)
        wide = {16} if re.search(r"ldmatrix|cp\.async\.cg", self.ptx) else set()
        return wide | {int(count) * int(bits) // 8 for count, bits in vectors}

    @property
    def shared_arrays(self) -> dict[str, int]:
        """The alignment of each array in shared memory, in bytes."""
        return {
            array: int(alignment)
            for alignment, array in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)", self.ptx)
        }

    def divisions_in_loops(self, kernel: str) -> list[str]:
        """The divisions of integers in a kernel from which it can come to them again."""
        lines = [line.strip() for line in self._body(kernel).splitlines()]
        labels = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}

        def following(place: int) -> list[int]:
            jump = re.search(r"^(@\S+\s+)?bra\S*\s+(\$\w+);", lines[place])
            on = (
                []
                if lines[place] == "ret;" or (jump and not jump[1]) or place + 1 == len(lines)
                else [place + 1]
            )
            return [labels[jump[2]], *on] if jump else on

        def comes_back(place: int) -> bool:
            seen, ahead = set(), following(place)
            while ahead:
                if (here := ahead.pop()) not in seen:
                    seen.add(here)
                    ahead += following(here)
            return place in seen

        divisions = [
            place
            for place, line in enumerate(lines)
            if re.search(r"\b(div|rem)\.[us](32|64)\b", line)
        ]
        return [lines[place] for place in divisions if comes_back(place)]

    def arithmetic_on(self, kernel: str, parameter: int) -> set[str]:
        """The first floating-point instructions that take what lies behind a pointer parameter.

        NVRTC contracts a product and a sum into `fma`, as do `mul` and `add` without `.rn` in ptxas.
        """
        lines = re.findall(
            r"^[\s{]*(?:@\S+\s+)?([a-z][\w.:]*)\s+([^;]+);", self._body(kernel), re.MULTILINE
        )
        reached: set[str] = set()
        found: set[str] = set()
        for (
            _
        ) in lines:  # until nothing new is reached: a register may be set further down, in a loop
            before = len(reached)
            for name, operands in lines:
                target, sources = (
                    re.findall(r"%\w+", part)
                    for part in re.fullmatch(
                        r"(\{[^}]*\}|[^,]*),?(.*)", operands, re.DOTALL
                    ).groups()
                )
                if f"{kernel}_param_{parameter}]" in operands:
                    reached |= {*target}
                elif reached & {*sources} and re.match(r"(add|sub|mul|fma)\..*f(32|64)$", name):
                    found.add(name)
                elif reached & {*sources} and not name.startswith(("st", "setp", "bra")):
                    reached |= {*target}
            if len(reached) == before:
                break
        return found

    def _body(self, kernel: str) -> str:
        return self.ptx.partition(f".entry {kernel}(")[2].partition(".entry ")[0]


class Wheels(NamedTuple):
    """Where a version of NVRTC and its headers lie, below the folder of NVIDIA's wheels."""

    library: str
    headers: str

    def load(self) -> c.CDLL:
        """NVRTC."""
        return c.CDLL(str(next(_folder(self.library).glob("libnvrtc.so.*"))))

    @property
    def include(self) -> str:
        """The option that names the folder of headers."""
        return f"-I{_folder(self.headers)}"


NEWEST = Wheels("cu13/lib", "cu13/include")
OLDEST = Wheels("cuda_nvrtc/lib", "cuda_runtime/include")


def _folder(below: str) -> Path:
    folders = importlib.util.find_spec("nvidia").submodule_search_locations
    return next(Path(folder) / below for folder in folders if (Path(folder) / below).is_dir())


class Compiler:
    """Compiles sources as the package does."""

    def __init__(self, wheels: Wheels = NEWEST) -> None:
        self._wheels, self._library = wheels, wheels.load()
        self._kept: dict[tuple, Compiled] = {}

    def compile(
        self, source: SourceFile, architecture: str, defines: dict[str, object]
    ) -> Compiled:
        """sm_80 gives a cubin, compute_80 PTX. AssertionError with the log if it does not compile."""
        key = source.text, architecture, str(defines)
        if key not in self._kept:
            self._kept[key] = self._compiled(source, architecture, defines)
        return self._kept[key]

    def _compiled(
        self, source: SourceFile, architecture: str, defines: dict[str, object]
    ) -> Compiled:
        program, size = c.c_void_p(), c.c_size_t()
        library = self._library
        library.nvrtcCreateProgram(
            c.byref(program), source.text.encode(), source.path.name.encode(), 0, None, None
        )
        options = [
            f"-arch={architecture}",
            *OPTIONS,
            self._wheels.include,
            *(f"-D{macro}={value}" for macro, value in defines.items()),
        ]
        if architecture.startswith("sm_"):
            options.append("--ptxas-options=-v")
        with own_locale():
            failed = library.nvrtcCompileProgram(
                program, len(options), (c.c_char_p * len(options))(*map(str.encode, options))
            )
        library.nvrtcGetProgramLogSize(program, c.byref(size))
        log = c.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        text = log.value.decode()
        assert not failed, f"{source.path.name} for {architecture} with {defines}:\n{text}"
        code, ptx = (
            self._got(kind, program)
            for kind in ("CUBIN" if architecture.startswith("sm_") else "PTX", "PTX")
        )
        library.nvrtcDestroyProgram(c.byref(program))
        return Compiled(code, text, ptx.decode(errors="replace"))

    def _got(self, kind: str, program: c.c_void_p) -> bytes:
        size = c.c_size_t()
        getattr(self._library, f"nvrtcGet{kind}Size")(program, c.byref(size))
        result = c.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{kind}")(program, result)
        return result.raw


class Module:
    """NVRTC behind the names of cupy.cuda.nvrtc."""

    class NVRTCError(RuntimeError):
        """As CuPy's."""

    def __init__(self) -> None:
        self._library = NEWEST.load()

    def getVersion(self) -> tuple[int, int]:
        numbers = c.c_int(), c.c_int()
        self._library.nvrtcVersion(*map(c.byref, numbers))
        return numbers[0].value, numbers[1].value

    def getSupportedArchs(self) -> list[int]:
        count = c.c_int()
        self._library.nvrtcGetNumSupportedArchs(c.byref(count))
        found = (c.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(found)
        return list(found)

    def createProgram(self, text: str, name: str, headers: tuple, names: tuple) -> int:
        program = c.c_void_p()
        self._library.nvrtcCreateProgram(
            c.byref(program), text.encode(), name.encode(), 0, None, None
        )
        assert program.value
        return program.value

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        words = (c.c_char_p * len(options))(*map(str.encode, options))
        if self._library.nvrtcCompileProgram(c.c_void_p(program), len(options), words):
            raise self.NVRTCError

    def _got(self, what: str, program: int) -> bytes:
        size = c.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(c.c_void_p(program), c.byref(size))
        result = c.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(c.c_void_p(program), result)
        return result.raw

    def getCUBIN(self, program: int) -> bytes:
        """As CuPy's, without the last byte."""
        return self._got("CUBIN", program)[:-1]

    def getPTX(self, program: int) -> bytes:
        return self._got("PTX", program)[:-1]

    def getProgramLog(self, program: int) -> str:
        return self._got("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program: int) -> None:
        self._library.nvrtcDestroyProgram(c.byref(c.c_void_p(program)))


def usages(log: str) -> dict[str, Usage]:
    """Every kernel's resources, from the log of a compilation for an sm_ architecture."""
    pattern = re.compile(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)$",
        re.DOTALL | re.MULTILINE,
    )
    found = {}
    for name, stores, loads, registers, rest in pattern.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Usage(
            int(registers), int(stores) + int(loads), int(shared[1]) if shared else 0
        )
    return found
