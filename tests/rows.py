"""Rows of the package's tables, for a test alone: other tests see the tables as they were."""

import importlib
import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import mpitrain
from mpitrain.config import plugins


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
    """{module.NAME: table} of all tables of the package, each where it is defined.

    Only these modules are imported: others need packages that a user may not have.
    """
    root = Path(mpitrain.__file__).parent
    package_tables = {}
    for path in sorted(root.rglob("*.py")):
        for name in re.findall(r"^(\w+): Table\[", path.read_text(), re.MULTILINE):
            module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
            imported = importlib.import_module(module.removesuffix(".__init__"))
            package_tables[f"{module}.{name}"] = getattr(imported, name)
    return package_tables


@contextmanager
def added_rows():
    """A context after which no plugin has been imported in it: tables are as before."""
    with ExitStack() as stack:
        for table in tables().values():
            stack.enter_context(patch.dict(table))
        stack.enter_context(patch.dict(plugins._ERRORS))
        yield
