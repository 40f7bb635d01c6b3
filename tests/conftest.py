"""What mpirun needs on any machine (root in a container, more ranks than cores, one BLAS thread per rank), and marks."""

import gc
import os
import shutil
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from mpitrain.machine.process import gpus
from tests.processes import SECONDS

TESTS = Path(__file__).parent
SETTINGS = {
    "HOME": str(Path.home()),  # Open MPI starts no rank without
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the core to the others
    "OMPI_MCA_osc": "^ucx",  # prints an error per rank where there is no UCX device
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "sm,self",  # one host: starts in 0.2 s instead of 1.2 s
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # the same for MPICH
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

JOBS = [f"ranks/{room}" for room in ("bench", "certify", "parallel", "plan", "report", "run")]
"""Rooms whose tests train or measure on several ranks."""
TOOLS = (
    "bench",
    "certify",
    "cli",
    "doctor",
    "house",
    "jobs",
    "plan",
    "readers",
    "report",
    "textbook",
)
"""Rooms of `unit` and `ranks` that prove no part of the engine."""
LONGEST = (
    "mpi",
    "huggingface",
    "ranks",
    "unit/jobs",
    "unit/textbook",
    "unit/kernels",
    "unit/plan",
    "unit/pipeline",
)
"""Rooms whose files take longest: under `-n` they come first, so that no worker is left with one at the end."""
COMPILED = ("cuda-sim", "simulated kernels", "compiled")
"""Words in parameters of tests that compile, or in the names of these."""
OTHERS = {"compile", "mpi", "huggingface", "slow", "gpu"}
"""Marks of which a test that is `fast` has none."""
NO_GPU = "CuPy finds no GPU here"
NO_COMPILER = "they need a compiler: pip install ziglang, or apt install g++"

for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # where it is set, each of some hundred ranks compiles all that it imports
sys.dont_write_bytecode = False
os.environ["PATH"] = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the mpirun of this environment
)


def pytest_addoption(parser):
    """The option by which a product of parameters runs whole."""
    parser.addoption(
        "--products",
        action="store_true",
        help="run every combination of the values of a test's parameters, not only a few that have every value",
    )


def pytest_terminal_summary(terminalreporter, config):
    """Keep why tests were skipped, in the cache, and say how many the missing compiler has cost."""
    skipped = {
        each.nodeid: str(each.longrepr) for each in terminalreporter.stats.get("skipped", ())
    }
    if cache := getattr(config, "cache", None):
        cache.set("mpitrain/skipped", skipped)
    if count := sum(NO_COMPILER in reason for reason in skipped.values()):
        terminalreporter.write_line(f"{count} tests skipped: {NO_COMPILER}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests by room and by what they start, skip those whose GPU or compiler is missing here, and sort them for
    workers.
    """
    for item in items:
        kind, room = place(item.path)
        if kind in ("unit", "ranks", "golden") and room.partition("/")[0] not in TOOLS:
            item.add_marker("engine")
        if kind in ("mpi", "huggingface"):
            item.add_marker(kind)
        if f"{kind}/{room}" in JOBS:
            item.add_marker("slow")
        if (kind, room) == ("unit", "kernels"):
            item.add_marker("compile")
        chosen = (
            f"{item.name.partition('[')[2]} {item.callspec.params.values()}"
            if hasattr(item, "callspec")
            else ""
        )
        if any(words in chosen for words in COMPILED):
            item.add_marker("compile")
        if not OTHERS & {mark.name for mark in item.iter_markers()}:
            item.add_marker("fast")
    # Not above: SETTINGS come before NumPy.
    from mpitrain.machine.compiling import has_compiler

    for mark, reason, has in (("gpu", NO_GPU, gpus), ("compile", NO_COMPILER, has_compiler)):
        wanting = [item for item in items if item.get_closest_marker(mark)]
        if wanting and not has():
            for item in wanting:
                item.add_marker(pytest.mark.skip(reason=reason))
    if not (config.getoption("products") or any("::" in name for name in config.args)):
        _cover(config, items)
    if hasattr(config, "workerinput"):
        items.sort(key=_place_in_line)


def _cover(config, items):
    """Of each test with several parameters, keep a few combinations in which every value of every parameter occurs; of
    those marked `pairs`, every two values of two parameters; of those marked `product`, all. What is skipped here costs
    nothing, proves nothing and stays.
    """
    of_function = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not (item.get_closest_marker("product") or _skips(item)):
            of_function[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for alike in of_function.values():
        parameters = _parameters(alike[0])
        if len(alike) > 1 and len(parameters) > 1:
            at_once = 2 if alike[0].get_closest_marker("pairs") else 1
            left_out |= {*alike} - {*_covering(alike, parameters, at_once)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _skips(item):
    """Whether a mark says that the test is skipped here."""
    return item.get_closest_marker("skip") or any(
        mark.args[0] for mark in item.iter_markers("skipif")
    )


def _parameters(item):
    """Names of each parameter: of a `parametrize` one or more that go together; of a fixture with `params`, and of a test
    marked `pairs`, its own.
    """
    if item.get_closest_marker("pairs"):
        return [[name] for name in item.callspec.params]
    written = [mark.args[0] for mark in item.iter_markers("parametrize")]
    marks = [
        each.replace(",", " ").split() if isinstance(each, str) else [*each] for each in written
    ]
    marked = {name for names in marks for name in names}
    return marks + [[name] for name in item.callspec.params if name not in marked]


def _covering(items, parameters, at_once):
    """Items that together have each value of each parameter, or every so many at once that one item has; of those with
    most new ones, the one whose values were taken least.
    """
    # A value is the same object in all combinations.
    values = {
        item: [
            tuple((name, id(item.callspec.params[name])) for names in chosen for name in names)
            for chosen in combinations(parameters, at_once)
        ]
        for item in items
    }
    taken = Counter()
    while missing := {value for all_of in values.values() for value in all_of} - {*taken}:
        best = max(
            values,
            key=lambda item: (
                len(missing & {*values[item]}),
                -sum(taken[value] for value in values[item]),
            ),
        )
        taken.update(values[best])
        yield best


@cache
def place(path):
    """The kind of a file's tests, and their room of that kind: the first folder in tests/, and the folders in it."""
    kind, _, room = path.parent.relative_to(TESTS).as_posix().partition("/")
    return kind, room


def _place_in_line(item):
    """The number of the test's room in LONGEST, and of all others the last."""
    kind, room = place(item.path)
    found = [number for number, long in enumerate(LONGEST) if long in (kind, f"{kind}/{room}")]
    return found[0] if found else len(LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Remove the all-reduces that a test has read from files, because error messages list all
    algorithms.
    """
    # Not above: SETTINGS come before NumPy.
    from mpitrain.collectives.selection.algorithm import is_file
    from mpitrain.collectives.selection.table import ALL_REDUCE

    for name in [name for name in ALL_REDUCE if is_file(name)]:
        del ALL_REDUCE[name]


def pytest_sessionstart():
    """Let g++ compile the simulator's fast build without optimization, in a fifth of the time: few launches follow.

    Users' build has its proof in tests with `users_kernels`, and in the commands that tests start.
    """
    # Not above: SETTINGS come before NumPy.
    from mpitrain.kernels.simulator.build import FLAGS

    FLAGS["fast"] = _with("-O0", FLAGS["fast"])


def _with(level, flags):
    return tuple(level if flag in ("-O0", "-O2") else flag for flag in flags)


def pytest_collection_finish():
    """Spare what four thousand collected tests hold from being walked whenever a test collects garbage."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under `-n`: one worker runs all of mpi/, in order, since ranks of two tests at a time are more than the cores bear.

    Every other file runs on the worker that is free next, whole: its tests share what a fixture or a cache has computed.
    `mpi/conftest.py` fails where this is not obeyed.
    """
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling

    class OneAfterAnother(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "mpi" if nodeid.startswith("tests/mpi/") else nodeid.partition("::")[0]

        def mark_test_complete(self, node, item_index, duration=0):
            # It counts what is left of all that it has assigned, after each of thousands of tests.
            super().mark_test_complete(node, item_index, duration)
            assigned = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(assigned[scope].values()):
                del assigned[scope]

    return OneAfterAnother(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give every test its time."""
    if config.option.timeout is None:
        config.option.timeout = 3 * SECONDS
    if hasattr(config.option, "maxworkerrestart"):
        config.option.maxworkerrestart = (
            0  # a worker that dies fails the run at once, and nobody waits for its tests
        )


@cache
def _users_kernels():
    from mpitrain.kernels.loader import Kernels
    from mpitrain.kernels.simulator.machine import Simulator

    return Kernels(Simulator())


@pytest.fixture
def users_kernels(monkeypatch):
    """Make device kind cuda-sim compute by kernels that are compiled with the flags of users."""
    from mpitrain.kernels.simulator.build import FLAGS
    from mpitrain.ops.device import KERNELS

    monkeypatch.setitem(FLAGS, "fast", _with("-O2", FLAGS["fast"]))
    monkeypatch.setitem(KERNELS, "cuda-sim", _users_kernels)


@pytest.fixture
def binutils():
    """The programs that know the line of an instruction."""
    if not shutil.which("addr2line"):
        pytest.skip("needs addr2line (apt install binutils)")


@pytest.fixture
def no_compiler(monkeypatch):
    """Neither PATH nor Python has a compiler."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ziglang", None)
