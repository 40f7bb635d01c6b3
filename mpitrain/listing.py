"""What help() and dir() list of the classes that `import mpitrain` offers."""


class Listed(type):
    """The metaclass of public classes: their public names are listed, not those that every Python class has."""

    def __dir__(cls) -> list[str]:
        return [name for kind in cls.__mro__ if isinstance(kind, Listed) for name in vars(kind) if name[0] != "_"]


class ListedLayer(Listed):
    """The metaclass of public layers: their methods are those of the protocol `Layer`, which a `Trainer` calls."""

    def __dir__(cls) -> list[str]:
        return []
