"""Breaks the kernels one place at a time, and asks whether their cases notice.

A mutant is a copy of the sources with one barrier, one wait for asynchronous copies, or one atomic removed, with one
comparison against an edge weakened by one, or with one minimum against an edge dropped.
`python -m tests.unit.kernels.mutation` runs them all (some minutes on two cores) and says how many were noticed, with
`--equivalent` those that are listed as equivalent, of which nobody may notice any; the tests run one of every kind.
"""

import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mpitrain.kernels.loader import Kernels
from mpitrain.kernels.simulator.build import build_runtime
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.kernels.source import FOLDER, Signature, SourceFile, package_sources
from mpitrain.machine.compiling import cache_of
from tests.cases.suite import SUITE

# What a comparison with it on the right guards an edge, as does a minimum with it. Loops over tiles of fixed size are none.
EDGES = (
    "M|N|K|T|C|V|D|B|P|E|R|n|HEAD|CHUNKS|end|rows|columns|count|used|runs|warps|found|left|rows_left|splits|k_end|k_left|t0|t|ties|"
    r"apart|past|capacity|groups|\(long long\)(?:B|rows)|int\(blockDim|key|whole_end|seen_by_all|masked_end"
)
BOUNDS = (
    r"n - i|n - mine|end - i|used - here\.first|n|K|tiles_m - first|V - v0|W - 1|width_left - 1|T|"
    r"columns_left - c|ties"
)
MUTATIONS = {
    "barrier removed": (re.compile(r"__sync(?:threads|warp)\(\);"), ";"),
    "wait removed": (re.compile(r"copy_async_(?:wait<[^>]*>|commit)\(\);"), ";"),
    "atomic made plain": (re.compile(r"atomicAdd\(&(\w+\[[^,]+), ([^;]+)\);"), r"\1 += \2;"),
    "edge moved": (re.compile(rf"(?<![<>=])(<|>=|<=) (?=(?:{EDGES})\b|(?:32|TILE_M);)"), None),
    "lower edge moved": (re.compile(r"(?<=>= )0 &&"), "-1 &&"),
    "bound dropped": (re.compile(rf"min\((?:{BOUNDS}), (?!\))"), "("),
    "bound dropped at the end": (re.compile(rf"min\(((?:[^,()]|\(\))+), (?:{BOUNDS})\)"), r"(\1)"),
    "lower bound dropped": (re.compile(r"max\(0, "), "("),
}
# Of kernels by warpgroups; in the tests planted_hopper.cu stands for them, which compiles once for all.
MUTATIONS_OF_HOPPER = {
    "wait of Hopper removed": (
        re.compile(
            r"(?<!void )(?:barrier_wait|wgmma_wait<\d>|wgmma_fence|wgmma_commit|proxy_fence|cluster_sync|leave)\([^;{]*\);"
        ),
        ";",
    ),
    "arrivals miscounted": (re.compile(r"(barrier_init\((?!unsigned)[^,;]+, )"), r"\g<1>1 + "),
    "phase kept": (re.compile(r"parity \^(=?) 1"), r"parity ^\1 0"),
}
MOVED = {"<": "<= ", ">=": "> ", "<=": "<= 1 + "}

MODULE = "tests.unit.kernels.mutation"
PATIENCE = 60
"""Seconds of processor time, however busy the machine, for the cases of one mutant; those of a whole kernel need less than 1."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

PADDING = "the tile is padded by a four of zeros there, which load_run, store_run and the sums leave alone"
OVER_SHARES = "for (long long i = N * (blockIdx.x * 256LL + threadIdx.x); i <= n; i += N * 256LL * gridDim.x) {"
EMPTY_RUN = "in a run of which no element exists nothing is loaded or stored"
UNUSED_COPY = "it starts a copy of rows that the loop never comes to"
NO_ROWS = "a warp computes with rows that do not exist, and stores nothing"

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "dropout.cu",
        "for (long long i = blockIdx.x * 256LL + threadIdx.x; i <= runs; i += 256LL * gridDim.x) {",
    ): "the block after a row's last begins at its end or later, and is skipped",
    ("dropout.cu", "if (c > C) continue;"): "a block that begins at a row's end has no element",
    ("attention.cuh", "if (d > HEAD) break;"): PADDING,
    (
        "attention.cuh",
        "for (int t0 = begin; t0 <= end; t0 += TILE) {",
    ): "one more tile, of queries that do not exist, adds 0",
    (
        "attention_tensor_backward.cu",
        "const Element *qs = passing.arrive(t0, t0 + STEP <= end), *dys = qs + Other::ELEMENTS;",
    ): UNUSED_COPY,
    ("attention_tensor_backward.cu", "passing.fetch(t0, t0 <= end);"): UNUSED_COPY,
    (
        "attention_tensor_backward.cu",
        "if (masks && (s0 + m > T || at0 + STEP <= s0 + m)) return;    // no keys, or all after these queries",
    ): NO_ROWS,
    **{
        (f"attention_tensor{half}.cu", line): why
        for half, step in (("", "attend"), ("_backward", "add"))
        for line, why in (
            (
                f"for (; s0 <= end; s0 += STEP) {step}(s0, true);",
                "one more step, of keys that no query sees",
            ),
            (
                f"for (; ROOMY && s0 <= seen_by_all; s0 += STEP) {step}(s0, true);",
                "one more step is masked, of keys that all queries see",
            ),
            (
                "if (masks && (s0 <= seen_by_all || (DOCUMENTS == 2 && end < s0 + STEP))) "
                "hide<true>(p, t0 + m, s0, bounds);",
                "it hides no key of a step that all queries see",
            ),
            (
                "const Element *ks = keys.arrive(s0, (!GENERAL && !masks) || s0 + STEP <= end), "
                "*vs = ks + Other::ELEMENTS;",
                UNUSED_COPY,
            ),
        )
    },
    (
        "attention_hopper.cu",
        ";    // for speed alone: no value depends on who goes first",
    ): "each product waits for its own operands",
    (
        "attention_hopper_backward.cu",
        "for (int tile = begin * GROUP; tile <= end * GROUP; ++tile) "
        "put_dq(zeros, h0 + tile % GROUP, tile / GROUP * STEP);",
    ): "the next tile is cleared, which is then stored without being read, or does not exist",
    (
        "attention_tensor_backward.cu",
        "const int end = min((at0 + OWNED), bounds.end_key(last));    // of the keys that are seen",
    ): "the keys behind are zeros, which add 0 to dq",
    (
        "attention_hopper.cu",
        "last = first + (end - 1 - first) / STEP * STEP;",
    ): "no query's first key is behind the end of the keys, and -1 / STEP is 0",
    ("flat.cuh", OVER_SHARES): EMPTY_RUN,
    (
        "gemm_tensor.cu",
        "for (int step = first; step <= end; ++step) {",
    ): "one more step, of zeros, adds 0",
    ("gemm.cu", "if (k_begin <= k_end) {"): "with nothing to sum over it loads zeros",
    (
        "gemm.cu",
        "const bool more = k0 + TILE_K <= k_end;",
    ): "behind the last piece it loads zeros that nobody reads",
    ("layer_norm.cu", "for (int c = WIDE * lane; c <= C; c += 32 * WIDE) {"): EMPTY_RUN,
    (
        "layer_norm.cu",
        "if (WIDE * (lane + 32 * r) <= C) take(WIDE * (lane + 32 * r), held[r]);",
    ): EMPTY_RUN,
    (
        "layer_norm.cu",
        "for (int c = WIDE * threadIdx.x; c <= C; c += WIDE * blockDim.x) {",
    ): EMPTY_RUN,
    ("cross_entropy.cu", "for (; v <= V; v += step) {"): EMPTY_RUN,
    (
        "cross_entropy.cu",
        "for (int v = WIDE * threadIdx.x; v <= V; v += WIDE * blockDim.x) store_run(row, v, V, vector, zeros);",
    ): EMPTY_RUN,
    (
        "cross_entropy.cu",
        "const int place = target >= 0 && target <= V ? int(target) : -1, run_of_target = place / WIDE * WIDE;",
    ): "no run stores an element of column V",
    (
        "cross_entropy.cu",
        "const int place = target >= -1 && target < V ? int(target) : -1, run_of_target = place / WIDE * WIDE;",
    ): "-1 stands for no column",
    ("embedding.cu", "for (int c = WIDE * lane; c <= C; c += COLUMNS) {"): EMPTY_RUN,
    ("embedding.cu", "const bool mine = slot >= -1 && slot < 32;"): "no warp owns a row below 0",
    (
        "element.cuh",
        "if (vector && first + N <= 1 + end) return *reinterpret_cast<const Run<T, N>*>(row + first);",
    ): "rows that are in runs end with a whole run",
    ("embedding.cu", "for (int i = 0; i <= found; i += AHEAD) {"): "one more round finds no row",
    (
        "embedding.cu",
        "for (int m0 = 0; m0 <= M; m0 += 128) {",
    ): "one more chunk, of rows that do not exist, finds nothing",
    (
        "attention_next.cu",
        "for (int k0 = max(0, end - window); k0 <= end; k0 += 32) {",
    ): "one more step, of keys that do not exist, has no weight",
    ("top_k.cu", "for (int step = 1; step <= 32; step *= 2) {"): "no lane has another 32 before it",
    (
        "top_k.cu",
        "for (long long round = begin; round <= end; round += ROUND) {",
    ): "one more round finds zeros",
    ("pointwise.cu", "for (int c = WIDE * lane; c <= C; c += 32 * WIDE) {"): EMPTY_RUN,
    (
        "experts.cu",
        "for (int step = 1; step <= 32; step *= 2) {",
    ): "no lane has another 32 before it",
    ("experts.cu", "for (int j0 = 0; j0 <= n; j0 += 32) {"): "one more round finds no choice",
    ("experts.cu", "for (int e0 = 0; e0 <= E; e0 += 32) {"): "one more round has no expert",
    ("experts.cu", "for (int c = WIDE * (threadIdx.x % 32); c <= C; c += COLUMNS) {"): EMPTY_RUN,
    (
        "experts.cu",
        "for (int c = WIDE * lane; c <= C && places[j] >= 0; c += COLUMNS) {",
    ): EMPTY_RUN,
}
"""(file, broken line) -> why the mutant behaves like the original."""


class Mutant(NamedTuple):
    """One change: where, what, the line as it is then, and the text of the whole changed file."""

    file: str
    line: int
    kind: str
    broken: str
    text: str

    @property
    def known(self) -> str | None:
        """Why it is equivalent, if it is."""
        return EQUIVALENT.get((self.file, self.broken))


def mutants() -> list[Mutant]:
    """Every mutant of every source and header, in the order of the files."""
    found = []
    for path in sorted(FOLDER.glob("*.cu*")):
        text = path.read_text()
        code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), text)
        for kind, (pattern, replacement) in (MUTATIONS | MUTATIONS_OF_HOPPER).items():
            for match in pattern.finditer(code):
                new = MOVED[match[1]] if replacement is None else match.expand(replacement)
                changed, line = (
                    text[: match.start()] + new + text[match.end() :],
                    text.count("\n", 0, match.start()),
                )
                found.append(
                    Mutant(path.name, line + 1, kind, changed.splitlines()[line].strip(), changed)
                )
    return found


def sources_with(file: str) -> list[str]:
    """The sources that a changed file goes into."""
    if file.endswith(".cu"):
        return [file.removesuffix(".cu")]
    names, found = {file}, []
    headers = {path.name: path.read_text() for path in FOLDER.glob("*.cuh")}
    for _ in headers:
        names |= {
            name for name, text in headers.items() if any(f'"{used}"' in text for used in names)
        }
    for path in sorted(FOLDER.glob("*.cu")):
        if any(f'"{name}"' in path.read_text() for name in names):
            found.append(path.stem)
    return found


class Apart(Simulator):
    """Compiles changed sources to a folder of their own; what the change does not reach is in the cache of all."""

    def __init__(self, folder: Path, order: Literal["forward", "reverse"]):
        super().__init__(checked=True, order=order)
        self._all, self._apart = self.cache, folder

    def load(self, source: SourceFile, signature: Signature, defines: dict[str, str]) -> Any:
        is_changed = source.text != package_sources()[source.path.stem].text
        self.cache = self._apart if is_changed else self._all
        return super().load(source, signature, defines)


def judge(mutant: Mutant, folder: Path) -> str | None:
    """Run the cases on a mutant in two orders of threads, here and now; who noticed, in one line, or None.

    raises  KernelError if it does not compile: that is no mutant
    """
    sources = folder / "kernels"
    shutil.copytree(
        FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "simulator", "__pycache__")
    )
    (sources / mutant.file).write_text(mutant.text)
    runtime = build_runtime(cache_of("simulator"))
    for path in runtime.parent.glob(f"{runtime.name}*"):  # with its digest
        (folder / path.name).symlink_to(path)
    devices = [Kernels(Apart(folder, order), folder=sources) for order in ("forward", "reverse")]
    groups = [group for source in sources_with(mutant.file) for group in SUITE[source]]
    for case in (case for group in dict.fromkeys(groups) for case in group()):
        for device in devices:
            try:
                case(device)
            except (OSError, subprocess.SubprocessError):
                raise
            except Exception as error:
                if "cannot compile" in str(error):
                    raise
                return f"{type(error).__name__} {str(error).partition(chr(10))[0][:150]}"
    return None


def notice(number: int) -> str | None:
    """Judge a mutant in a process of its own: one that crashes or does not end is noticed too."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, "--judge", str(number), folder],
            capture_output=True,
            text=True,
        )
    if done.returncode == -signal.SIGXCPU:
        return f"no end within {PATIENCE} s of processor time"
    if -done.returncode in CRASHES:
        return f"crash: {signal.Signals(-done.returncode).name}"
    if done.returncode:
        raise RuntimeError(
            f"mutant {number} could not be judged: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )
    return done.stdout.strip() or None


def run(numbers: list[int], workers: int = 2) -> Iterator[tuple[Mutant, str | None]]:
    """Each mutant and who noticed it, in order, as it is known."""
    everything = mutants()
    with ThreadPoolExecutor(workers) as pool:
        for number, noticed in zip(numbers, pool.map(notice, numbers), strict=True):
            yield everything[number], noticed


def changing() -> list[int]:
    """The numbers of the mutants that are not known to behave like the original."""
    return [number for number, mutant in enumerate(mutants()) if mutant.known is None]


def sample() -> list[int]:
    """One of every kind, in the sources that compile soonest: the same every time."""
    everything = mutants()
    lengths = {name: len(source.text) for name, source in package_sources().items()}

    def length(number: int) -> int:
        return sum(lengths[name] for name in sources_with(everything[number].file))

    sampled = [number for number in changing() if everything[number].kind in MUTATIONS]
    slowest_first = sorted(sampled, key=length, reverse=True)
    return sorted({everything[number].kind: number for number in slowest_first}.values())


def main(files: list[str]) -> None:
    """Run all mutants of the files, or of all files, and print a line for each."""
    numbers = [number for number in changing() if not files or mutants()[number].file in files]
    seen = 0
    for done, (mutant, noticed) in enumerate(run(numbers), 1):
        seen += noticed is not None
        print(
            f"{done}/{len(numbers)} {mutant.file}:{mutant.line}: {mutant.kind}: {mutant.broken[:80]} -> "
            f"{noticed or 'NOT NOTICED'}",
            flush=True,
        )
    print(
        f"noticed {seen} of {len(numbers)}; {len(mutants()) - len(changing())} more are equivalent"
    )


def check_equivalent() -> None:
    """Run the mutants said to be equivalent, and print those that are noticed: they are not."""
    for mutant, noticed in run(sorted(set(range(len(mutants()))) - set(changing()))):
        print(
            f"{mutant.file}:{mutant.line}: {mutant.broken[:80]} -> {noticed or mutant.known}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--judge"]:
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, resource.RLIM_INFINITY))
        print(judge(mutants()[int(sys.argv[2])], Path(sys.argv[3])) or "")
    elif sys.argv[1:] == ["--equivalent"]:
        check_equivalent()
    else:
        main(sys.argv[1:])
