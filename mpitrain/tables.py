"""The dict of every kind of thing that a user can add: one row for each name."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from mpitrain.errors import ConfigError, MpitrainError, line_in

Name = TypeVar("Name")
Row = TypeVar("Row")
Made = TypeVar("Made")

_plugin = ""


@contextmanager
def rows_of(plugin: str) -> Iterator[None]:
    """A context in which the rows that are added belong to a plugin."""
    global _plugin
    _plugin = plugin
    try:
        yield
    finally:
        _plugin = ""


def on_use(home: str) -> Callable[..., Any]:
    """Return a function that imports module:function and calls it: a row imports nothing before."""

    def call(*arguments: Any) -> Any:
        module, _, function = home.partition(":")
        return getattr(import_module(module), function)(*arguments)

    return call


class Table(dict[Name, Row]):
    """A dict whose names cannot be assigned twice, so no plugin replaces a built-in row.

    All rows have the type of the first one; if it is a class, they have its base. Readers look a row
    up when they need it, and import no copy of the names.
    """

    def __init__(self, *rows: Any, **named: Row):
        super().__init__(*rows, **named)
        self._built_in = frozenset(self)
        self._plugins: dict[Name, str] = {}

    def __setitem__(self, name: Name, row: Row) -> None:
        if name in self:
            raise ConfigError(
                f"A name has one row in its table, but {name!r} is there already, as in: "
                f"{', '.join(map(str, self))}.",
                "Choose another name.",
            )
        first = next(iter(self.values()), row)
        kind = first.__mro__[-2] if isinstance(first, type) else type(first)
        if isinstance(first, type) and not (isinstance(row, type) and issubclass(row, kind)):
            raise ConfigError(
                f"A row of this table is a subclass of {kind.__name__}, but that of {name!r} is "
                f"{row!r:.60}.",
                f"Make a subclass of {kind.__name__}.",
            )
        if not isinstance(first, type) and not isinstance(row, kind):
            raise ConfigError(
                f"A row of this table is of the type {kind.__name__}, but that of {name!r} is of the "
                f"type {type(row).__name__}.",
                f"Make a {kind.__name__}.",
            )
        super().__setitem__(name, row)
        self._plugins[name] = _plugin

    def is_added(self, name: Name) -> bool:
        """Whether a plugin, a file or a program of the user has added the row."""
        return name not in self._built_in

    def of_plugin(self, name: Name) -> str:
        """Return ` of the plugin FILE` for a row that a plugin has added, else nothing."""
        plugin = self._plugins.get(name)
        return f" of the plugin {plugin}" if plugin else ""

    def made(
        self,
        name: Name,
        kind: str,
        make: Callable[[], Made],
        form: str,
        is_right: Callable[[Made], bool],
    ) -> Made:
        """Return what a function of an added row makes.

        kind, form  of the row, and of what its function must return, for messages
        raises      ConfigError if the function raises, or returns anything else
        """
        title, way_out = f"The {kind} {name}{self.of_plugin(name)}", "Correct its function."
        try:
            made = make()
            is_refused = not is_right(made)  # It may raise, too, where the parts have other types.
        except (MpitrainError, MemoryError):
            raise
        except Exception as error:
            line = line_in(error, self._plugins.get(name, ""))
            where = f" in line {line}" if line else ""
            raise ConfigError(
                f"{title} must return {form}, but it raises {type(error).__name__}{where}: {error}",
                way_out,
            ) from error
        if is_refused:
            raise ConfigError(f"{title} must return {form}, but it returns {made!r:.60}.", way_out)
        return made

    # These add rows by `__setitem__`, unlike those of a dict.
    update, setdefault = MutableMapping.update, MutableMapping.setdefault

    def __ior__(self, rows: Any) -> "Table[Name, Row]":  # type: ignore[override, misc]
        self.update(rows)
        return self
