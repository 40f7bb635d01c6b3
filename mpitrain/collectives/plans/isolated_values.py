"""Values of a user's functions, and sentences about them, as JSON.

Numbers, text, lists and tuples are themselves, and so are named tuples and other subclasses. Of any
other object only its type and a short text are sent. Nothing here imports NumPy unless an array is sent.
"""

import json
import sys
from collections.abc import Callable, Generator
from typing import Any

from mpitrain.errors import Sentence

PLAIN = (bool, int, float, str, type(None))
SHOWN = 60
"""Characters of the text of an object."""
DTYPES = {"f": "float64", "i": "int64", "u": "uint64"}
"""{kind of an array's dtype: dtype of its copy in the other process}."""


class Foreign:
    """An object of the user's process, which stays there.

    kind  name of its type
    text  its repr, shortened
    """

    def __init__(self, kind: str, text: str):
        self.kind, self._text = kind, text

    def __repr__(self) -> str:
        return self._text


def kind_of(value: Any) -> str:
    """Return the name of a value's type in the user's process."""
    return value.kind if isinstance(value, Foreign) else type(value).__name__


def encoded(value: Any, generators: list[Any]) -> Any:
    """Return a value as JSON.    generators: gets each generator of the value"""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list):
        return [encoded(one, generators) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(one, generators) for one in value]}
    numpy: Any = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.ndarray) and value.dtype.kind in DTYPES:
        return {"array": value.ravel().tolist(), "of": [value.dtype.kind, *value.shape]}
    if isinstance(value, Generator):
        generators.append(value)
        return {"generator": len(generators) - 1}
    return {"foreign": [type(value).__name__, f"{value!r:.{SHOWN}}"]}


def decoded(line: bytes | str, running: Callable[[int], Any]) -> Any:
    """Return a value from a line of JSON; ValueError, TypeError or LookupError for malformed JSON.

    running  (number of a generator) -> its stand-in here
    """

    def value(found: dict[str, Any]) -> Any:
        key = next(iter(found), "")
        inner = found.get(key)
        if key == "tuple":
            return tuple(inner)  # type: ignore[arg-type]
        if key == "array":
            import numpy as np

            kind, *shape = found["of"]
            return np.array(inner, DTYPES[kind]).reshape(shape)
        if key == "generator":
            return running(int(inner))  # type: ignore[arg-type]
        if key == "foreign":
            kind, text = inner  # type: ignore[misc]
            return Foreign(str(kind)[:SHOWN], str(text)[:SHOWN])
        return found

    return json.loads(line, object_hook=value)


def as_json(value: Any) -> Any:
    """Return a `Sentence`, or the value of one of its fields, as JSON."""
    if isinstance(value, Sentence):
        return {"law": value.law, "values": {k: as_json(v) for k, v in value.values.items()}}
    return [as_json(one) for one in value] if isinstance(value, tuple) else value


def from_json(found: Any) -> Any:
    """Return a `Sentence`, or the value of one of its fields, from the result of `as_json`."""
    if isinstance(found, dict):
        return Sentence(found["law"], **{k: from_json(v) for k, v in found["values"].items()})
    return tuple(map(from_json, found)) if isinstance(found, list) else found
