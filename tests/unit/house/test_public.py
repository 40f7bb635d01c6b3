"""The public face: what `import mpitrain` offers, to programs, to people and to type checkers."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import mpitrain
from tests.processes import run

ROOT = Path(mpitrain.__file__).parents[1]


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(mpitrain, name)
    assert thing.__name__ == name, "a name of its own, not of something else"
    assert inspect.getdoc(thing), "says what it is for"
    assert name in mpitrain.__doc__.replace(",", " ").replace(":", " ").split(), (
        "and help(mpitrain) does"
    )
    assert name in dir(mpitrain)


def test_help_fits_on_some_pages_and_names_nothing_but_what_is_offered():
    program = "import pydoc, mpitrain; print(pydoc.plain(pydoc.render_doc(mpitrain)))"
    # In a process of its own, since other tests import more; without the path of the tree.
    text, *_ = run([sys.executable, "-c", program]).stdout.rpartition("\nFILE\n")
    assert len(text) < 64_000, (  # with five networks; its length depends on the version of Python
        "82,212 once: a tuning table stood in it as a default, and the sixty names of pydantic"
    )
    assert text and " at 0x" not in text and "model_dump" not in text
    assert {name for name in dir(mpitrain) if not name.startswith("__")} == {
        *mpitrain.__all__,
        "Config",
        "PeerLost",
        "learn",
    }


def test_a_lost_peer_is_caught_by_its_public_name():
    assert issubclass(mpitrain.PeerLost, mpitrain.MpitrainError)
    assert "PeerLost" in mpitrain.__doc__


def functions_of(thing):
    """A public function, or a class's constructor, methods and properties, inherited ones of ours included."""
    if not inspect.isclass(thing):
        return {thing.__name__: thing}
    ours = [kind for kind in thing.__mro__ if kind.__module__.startswith("mpitrain")]
    found = {
        name: member.fget if isinstance(member, property) else member
        for kind in reversed(ours)
        for name, member in vars(kind).items()
        if not name.startswith("_") or name == "__init__"
    }
    return {name: member for name, member in found.items() if inspect.isfunction(member)}


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_public_function_and_method_has_types_and_a_sentence(name):
    thing = getattr(mpitrain, name)
    for method, function in functions_of(thing).items():
        parameters = [
            p for p in inspect.signature(function).parameters.values() if p.name != "self"
        ]
        bare = [p.name for p in parameters if p.annotation is p.empty]
        assert not bare, f"{method} says of what type they are"
        if method != "__init__":
            assert inspect.signature(function).return_annotation is not inspect.Signature.empty, (
                method
            )
            assert inspect.getdoc(getattr(thing, method, function)), method


def test_type_checkers_see_the_public_names_where_programs_find_them():
    tree = ast.parse(Path(mpitrain.__file__).read_text())
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }
    assert seen == {name: f"mpitrain.{home}.{name}" for name, home in mpitrain._HOMES.items()}


PROGRAM = """
import numpy as np
import mpitrain

def total(group: mpitrain.Group) -> float:
    array = np.ones(4)
    group.all_reduce(array)
    return float(array[0])

try:
    with mpitrain.ranks() as transport:
        print(total(mpitrain.Group(transport, "ring")) + transport.rank)
    print(mpitrain.parse({"run": {"steps": 2}}).run.steps + 1)
except mpitrain.PeerLost as error:
    print(error.ranks[0] + 1, error.law.upper())
"""


@pytest.mark.slow
def test_a_type_checker_takes_a_users_program_and_finds_its_mistakes(tmp_path, monkeypatch):
    assert (ROOT / "mpitrain/py.typed").is_file()
    assert "mpitrain = py.typed" in (ROOT / "setup.cfg").read_text()
    api = pytest.importorskip("mypy.api")
    monkeypatch.chdir(tmp_path)
    wrong = PROGRAM.replace('"ring"', "3").replace("steps + 1", 'steps + "1"')
    Path("own.py").write_text(PROGRAM)
    Path("wrong.py").write_text(wrong)
    said, failure, _ = api.run(["--strict", "--follow-imports=silent", "own.py", "wrong.py"])
    found = [line.partition(":")[0] for line in said.splitlines() if "error:" in line]
    assert found == ["wrong.py"] * 2 and not failure, said


@pytest.mark.slow
def test_the_public_names_are_loaded_when_they_are_asked_for():
    code = (
        "import sys, mpitrain\n"
        "dir(mpitrain)\n"
        "assert not any(name.startswith('mpitrain.') for name in sys.modules)\n"
        "from mpitrain import Group, run_ranks\n"
        "assert 'mpitrain.collectives.group' in sys.modules and not {'mpi4py', 'mpitrain.run'} & set(sys.modules)\n"
        "from mpitrain import *\n"
        "assert Trainer is mpitrain.Trainer and callable(connect) and 'mpi4py.MPI' not in sys.modules\n"
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_offered_is_an_error_that_lists_those_that_are():
    with pytest.raises(AttributeError, match="attribute 'Optimizer';"):
        mpitrain.Optimizer  # noqa: B018 (looked up, not computed)
