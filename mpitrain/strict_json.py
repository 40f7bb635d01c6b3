"""A strict JSON parser (RFC 8259): a file from another program has one meaning, or is refused."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
    with _one_line():
        value = json.loads(data.decode(), **_RULES)
        if _may_have_surrogate(data):
            _check_text(value)
    return value


def elements(data: bytes) -> Iterator[tuple[Json, int]]:
    """Yield each element of a JSON text that is one array, and the position behind it in the text.

    raises  ValueError as `parsed`, at the first element with a mistake
    """
    with _one_line():
        text, has_surrogate = data.decode(), _may_have_surrogate(data)
        at = _mark(text, 0, "[")
        is_behind = text.startswith("]", _behind(text, at))
    decoder = json.JSONDecoder(**_RULES)
    while not is_behind:
        with _one_line():
            value, at = decoder.raw_decode(text, _behind(text, at))
            if has_surrogate:
                _check_text(value)
        yield value, at
        with _one_line():
            is_behind = text.startswith("]", _behind(text, at))
            at = at if is_behind else _mark(text, at, ",")
    with _one_line():
        if (at := _behind(text, _mark(text, at, "]"))) < len(text):
            raise json.JSONDecodeError("Extra data", text, at)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn each error of a parser into a ValueError with a message of one line."""
    try:
        yield
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        where = f"{line}column {error.colno}"
        raise ValueError(f"it breaks the rules of JSON in {where} ({error.msg})") from None


def _behind(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is no white space of JSON."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _mark(text: str, at: int, mark: str) -> int:
    """Return the position behind a mark, which comes next in the text."""
    if not text.startswith(mark, at := _behind(text, at)):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, at)
    return at + 1


def _may_have_surrogate(data: bytes) -> bool:
    return b"\\ud" in data.lower()


def _check_text(value: Json) -> None:
    """Raise ValueError for a lone surrogate, which is not valid text: printing it would fail."""
    json.dumps(value, ensure_ascii=False).encode()


def validated(model: type[Model], data: bytes) -> Model:
    """Parse a JSON text as this pydantic model.

    raises  ValueError with a message of one line, if it is not JSON or breaks a rule of the model
    """
    parsed(data)
    with _of_model():
        return model.model_validate_json(data)


def checked(model: type[Model], value: Json) -> Model:
    """Return a value of JSON as this pydantic model; ValueError as `validated`."""
    with _of_model():
        return model.model_validate(value)


@contextmanager
def _of_model() -> Iterator[None]:
    try:
        yield
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


_RULES: dict[str, Any] = {
    "object_pairs_hook": once,
    "parse_constant": refuse_constant,
    "parse_float": _number,
}
_SPACE = re.compile(r"[ \t\n\r]*")
