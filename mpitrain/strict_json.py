"""A strict JSON parser (RFC 8259): a file from another program has one meaning, or is refused."""

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)

Json = Any
"""None, a bool, a number, a str, or a list or a dict with str keys of these."""


def parsed(data: bytes) -> Json:
    """Return the value of a JSON text in UTF-8.

    raises  ValueError with a message of one line for anything else. This includes duplicate
            names in an object, NaN, infinities, numbers beyond float64 and too deep nesting.
    """
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=once,
            parse_constant=refuse_constant,
            parse_float=_number,
        )
        if (
            b"\\ud" in data.lower()
        ):  # A lone surrogate is not valid text, and printing it would fail.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        where = f"{line}column {error.colno}"
        raise ValueError(f"it breaks the rules of JSON in {where} ({error.msg})") from None
    return value


def validated(model: type[Model], data: bytes) -> Model:
    """Parse a JSON text as this pydantic model.

    raises  ValueError with a message of one line, if it is not JSON or breaks a rule of the model
    """
    parsed(data)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """Return the first finding of pydantic as a clause that names the key and the rule."""
    finding = error.errors(include_url=False)[0]
    where = ".".join(map(str, finding["loc"]))
    if finding["type"] == "missing":
        return f"it has no {where!a}"
    if finding["type"] == "extra_forbidden":
        return f"it has {where!a}, which has no meaning"
    law = finding["msg"].replace("Input should be", "it must be").replace("Input", "it")
    return f"of {where!a}, {law}" if where else law


def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Make a dict of the names and values of a JSON object; ValueError for a duplicate name."""
    members: dict[str, Json] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"it has {name!a} twice")
        members[name] = value
    return members


def refuse_constant(text: str) -> Json:
    """Raise ValueError for NaN or Infinity, which `json` accepts."""
    raise ValueError(f"JSON has no {text}")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
