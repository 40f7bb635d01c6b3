"""The public face: what `import mpitrain` offers, to programs, to people and to type checkers."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

import mpitrain
from tests.processes import run


@pytest.mark.parametrize("name", mpitrain.__all__)
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(mpitrain, name)
    assert thing.__name__ == name, "a name of its own, not of something else"
    assert inspect.getdoc(thing), "says what it is for"
    assert name in mpitrain.__doc__.replace(",", " ").replace(":", " ").split(), "and help(mpitrain) does"
    assert name in dir(mpitrain)


def test_type_checkers_see_the_public_names_where_programs_find_them():
    tree = ast.parse(Path(mpitrain.__file__).read_text())
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for block in tree.body if isinstance(block, ast.If) for node in block.body for alias in node.names
    }
    assert seen == {name: f"mpitrain.{home}.{name}" for name, home in mpitrain._HOMES.items()}


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
    with pytest.raises(AttributeError, match="no attribute 'Optimizer'; it offers ColumnParallelLinear, Config, Group"):
        mpitrain.Optimizer  # noqa: B018 (looked up, not computed)
