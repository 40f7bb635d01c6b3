"""Rows of the package's tables, for a test alone: other tests see the tables as they were."""

import importlib
import pkgutil
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import mpitrain
from mpitrain.config import plugins
from mpitrain.tables import Table


@contextmanager
def replaced(table, name, row):
    """A context in which the table has this row under a name that it has already."""
    before = table[name]
    dict.__setitem__(table, name, row)
    try:
        yield
    finally:
        dict.__setitem__(table, name, before)


def tables():
    """{module.NAME: table} of all tables of the package, each where it is defined."""
    for module in pkgutil.walk_packages(mpitrain.__path__, "mpitrain."):
        if (
            ".cli" not in module.name
            and "torch" not in module.name
            and "transformers" not in module.name
            and "__main__" not in module.name
        ):
            importlib.import_module(module.name)
    found = {}
    for module in [name for name in sys.modules if name.startswith("mpitrain.")]:
        source = getattr(sys.modules[module], "__file__", None)
        for name, value in vars(sys.modules[module]).items():
            if (
                isinstance(value, Table)
                and source
                and f"\n{name}: Table[" in Path(source).read_text()
            ):
                found[f"{module}.{name}"] = value
    return found


@contextmanager
def added_rows():
    """A context after which no plugin has been imported in it: tables are as before."""
    with ExitStack() as stack:
        for table in tables().values():
            stack.enter_context(patch.dict(table))
        stack.enter_context(patch.dict(plugins._ERRORS))
        yield
