"""The observer of compilations: it learns when this thread compiles a source, or waits for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

Observer = Callable[[str], AbstractContextManager[object]]
"""(name of the source) -> a context around its compilation."""


def _none(source: str) -> AbstractContextManager[object]:
    return nullcontext()


OBSERVER: ContextVar[Observer] = ContextVar("observer of compilations", default=_none)
"""The observer of this thread; ranks may be threads of one process."""


def compiling(source: str) -> AbstractContextManager[object]:
    """Return the context in which this thread compiles a source, or waits for another process that
    compiles it.
    """
    return OBSERVER.get()(source)
