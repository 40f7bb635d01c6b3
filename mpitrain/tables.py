"""The dict of every kind of thing that a user can add: one row for each name."""

from typing import Any, TypeVar

from mpitrain.errors import ConfigError

Name = TypeVar("Name")
Row = TypeVar("Row")


class Table(dict[Name, Row]):
    """A dict whose names cannot be assigned twice, so no plugin replaces a built-in row.

    All rows have the type of the first one. Readers look a row up when they need it, and import no
    copy of the names.
    """

    def __setitem__(self, name: Name, row: Row) -> None:
        if name in self:
            raise ConfigError(
                f"A name has one row in its table, but {name!r} is there already, as in: "
                f"{', '.join(map(str, self))}.",
                "Choose another name.",
            )
        kind = next(map(type, self.values()), type(row))
        if not isinstance(row, kind):
            raise ConfigError(
                f"A row of this table is of the type {kind.__name__}, but that of {name!r} is of the "
                f"type {type(row).__name__}.",
                f"Make a {kind.__name__}.",
            )
        super().__setitem__(name, row)

    def setdefault(self, name: Name, row: Row) -> Row:
        """Add the row if the name is new, and return the row of the name."""
        if name not in self:
            self[name] = row
        return self[name]

    def update(self, *rows: Any, **named: Row) -> None:
        """Add rows, given as to `dict.update`."""
        for name, row in dict(*rows, **named).items():
            self[name] = row

    def __ior__(self, rows: Any) -> "Table[Name, Row]":  # type: ignore[override, misc]
        self.update(rows)
        return self
