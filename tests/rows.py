"""Rows of the package's tables, replaced for a test. `Table` itself refuses that."""

from unittest.mock import patch


def replaced(table, name, row):
    """A context in which the table has this row under a name that it has already."""
    assert name in table
    return patch.dict(table, {name: row})
