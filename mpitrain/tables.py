"""The dict of every kind of thing that a user can add: one row for each name."""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from mpitrain.errors import ConfigError

Name = TypeVar("Name")
Row = TypeVar("Row")


class Table(dict[Name, Row]):
    """A dict whose names cannot be assigned twice, so no plugin replaces a built-in row.

    Readers look a row up when they need it, and import no copy of the names.
    """

    def __setitem__(self, name: Name, row: Row) -> None:
        if name in self:
            raise ConfigError(
                f"A name has one row in its table, but {name!r} is there already, as in: "
                f"{', '.join(map(str, self))}.",
                "Choose another name.",
            )
        super().__setitem__(name, row)

    def update(self, *rows: Any, **named: Row) -> None:
        for name, row in dict(*rows, **named).items():
            self[name] = row

    def __ior__(self, rows: Mapping[Name, Row]) -> Self:  # type: ignore[override, misc]
        self.update(rows)
        return self
