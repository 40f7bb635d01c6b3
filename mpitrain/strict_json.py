"""JSON as RFC 8259 has it, and no more: a file that somebody else wrote or damaged has one meaning,
or none.
"""

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)

Json = Any
"""None, a boolean, a number, a text, a list of these, or a dict of these by text."""


def parsed(data: bytes) -> Json:
    """The value of a JSON text in UTF-8; ValueError, in one line, for anything else.

    A name twice in one object, NaN, an infinity and a number beyond float64 are refused, as is what
    nests too deeply.
    """
    try:
        found = json.loads(
            data.decode(), object_pairs_hook=once, parse_constant=_constant, parse_float=_number
        )
        if (
            b"\\ud" in data.lower()
        ):  # half a pair of surrogates is no text, and could not even be printed
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    return found


def validated(model: type[Model], data: bytes) -> Model:
    """What a JSON text says, as this model has it; ValueError, in one line, if it is no JSON or
    breaks a rule of the model.
    """
    parsed(data)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """What pydantic has found first, in our words: what holds the value, and the rule."""
    found = error.errors(include_url=False)[0]
    where = ".".join(map(str, found["loc"]))
    if found["type"] == "missing":
        return f"it has no {where!a}"
    if found["type"] == "extra_forbidden":
        return f"it has {where!a}, which has no meaning"
    law = found["msg"].replace("Input should be", "it must be").replace("Input", "it")
    return f"of {where!a}, {law}" if where else law


def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object, as `json` hands its names and values; ValueError for a name that comes twice."""
    found: dict[str, Json] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {name!a} twice")
        found[name] = value
    return found


def _constant(text: str) -> Json:
    raise ValueError(f"JSON has no {text}")


def _number(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:20]} is too large a number")
    return found
