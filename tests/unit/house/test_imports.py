"""The direction of imports and the single doors, read from the source."""

import ast
import sys
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.processes import run

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[3] / "mpitrain"

# Ground floor first: a room imports only from itself and from rooms above it in this list.
ENGINE = [
    "errors",
    "tables",
    "files",
    "regions",
    "plots",
    "strict_json",
    "hints",
    "machine",
    "config",
    "data",
    "kernels",
    "ops",
    "layers",
    "formats",
    "models",
    "trace",
    "transport",
    "collectives",
    "optim",
    "parallel",
    "pipeline",
    "run",
    "torch",
]
TOOLS = ["text_table", "words", "plan", "bench", "doctor", "certify", "report", "textbook"]
FLOORS = [*ENGINE, *(f"tools.{name}" for name in TOOLS), "learn", "cli", "__main__"]

DOORS = {
    "mpi4py": ("transport/",),
    "cupy": ("machine/", "kernels/"),
    "click": ("cli/",),
    "tokenizers": ("data/tokenizer.py",),
    "pyarrow": ("data/records.py",),
    "os.environ": ("machine/process.py", "cli/"),
}


@cache
def tree(source: str) -> ast.Module:
    return ast.parse((PACKAGE / source).read_text())


SOURCES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def imported_names(source: str) -> frozenset[str]:
    """Every module a file imports, lazily or not, and "os.environ" where it reads the environment."""
    names = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
            names.add("os.environ")
    return frozenset(names)


def room(dotted: str) -> str:
    """The room of a module path such as mpitrain.ops.host or of a file such as tools/plan/memory.py."""
    names = dotted.removeprefix("mpitrain.").replace("/", ".").removesuffix(".py").split(".")
    return ".".join(names[: 1 + (names[0] == "tools")])


def test_every_room_has_its_floor_and_every_floor_its_room():
    assert {room(source) for source in SOURCES} - {"__init__", "tools.__init__"} == set(FLOORS)


def test_no_module_of_the_engine_imports_a_tool():
    for source in SOURCES:
        if not source.startswith(("tools/", "learn.py", "cli/", "__main__", "__init__")):
            names = imported_names(source)
            assert not [name for name in names if name.startswith("mpitrain.tools")], source


def test_a_file_imports_only_from_floors_above_it():
    for source in {*SOURCES} - {"__init__.py", "tools/__init__.py"}:
        own = FLOORS.index(room(source))
        for name in imported_names(source):
            if name.startswith("mpitrain.") and name != "mpitrain.__version__":
                assert FLOORS.index(room(name)) <= own, f"{source} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    """Not even lazily or for type checkers alone: a module is understood with those it imports."""
    names = {
        "mpitrain." + source.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): source
        for source in SOURCES
    }

    def modules_in(source):
        for name in imported_names(source):
            while name and name not in names:
                name = name.rpartition(".")[0]
            if name:
                yield name

    rest = {name: set(modules_in(source)) - {name} for name, source in names.items()}
    while leaves := [name for name, imported in rest.items() if not imported & rest.keys()]:
        for name in leaves:
            del rest[name]
    assert not rest, f"these import each other, or what does: {', '.join(sorted(rest))}"


TWO_MEANINGS = {
    # A section of the configuration has the name of the object that it configures.
    **dict.fromkeys(("Checkpoint", "Device", "Model", "Optimizer", "Pipeline"), 2),
    "Run": 2,  # likewise
    "Plan": 2,  # of a collective and of a pipeline: plugins import both
    "Replicated": 2,  # for arrays, and for a module of PyTorch
    "Request": 2,  # MPI's word, and the argument of a plugin's data source
}


def test_a_class_name_means_one_thing():
    classes = Counter(
        node.name
        for source in SOURCES
        for node in tree(source).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in classes.items() if count > 1} == TWO_MEANINGS


def test_each_library_enters_by_its_own_door():
    for source, (library, doors) in product(SOURCES, DOORS.items()):
        names = imported_names(source)
        if any(name == library or name.startswith(library + ".") for name in names):
            assert source.startswith(doors), f"{source} uses {library}; its doors are {doors}"


def test_help_loads_nothing_that_takes_long_to_load():
    code = (
        "import sys\n"
        "from mpitrain.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'numpy', 'mpi4py', 'cupy', 'pydantic', 'torch', 'safetensors', 'tqdm', 'tokenizers', 'importlib.metadata'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout
