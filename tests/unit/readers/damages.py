"""Damages of a file that hold for every format: to the values and the text of JSON, and to the file itself."""

import json
import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from mpitrain.errors import MpitrainError

NUMBER = [None, True, "7", [], {}, -1, 10**400]
WRONG = {
    int: [*NUMBER, 0.5],
    float: NUMBER,
    str: [None, 7, [], {}],
    bool: [None, 2, "x", []],
    list: [None, 7, "x", {}],
    dict: [None, 7, "x", [1]],
    type(None): [7, "x", {}],
}
"""What is no value where a value of this type stands."""
DEEP = 100_000


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """The place of every name in objects, and of the first and last element of lists; of several objects with the same names
    in an object, that of the first and the last.
    """
    alike: dict[Any, list[str]] = {}
    for name, one in value.items() if isinstance(value, dict) else ():
        alike.setdefault((*one,) if isinstance(one, dict) and one else name, []).append(name)
    steps: list[Any] = [step for names in alike.values() for step in {names[0]: 0, names[-1]: 0}]
    if isinstance(value, list):
        steps = sorted({0, len(value) - 1} if value else ())
    for step in steps:
        yield (*place, step)
        yield from places(value[step], (*place, step))


def of_values(value: Any) -> Iterator[tuple[str, Any]]:
    """(`a.b: damage`, the value with this damage): other types, less and more of a list or an object."""
    for place in [(), *places(value)]:
        here = value
        for step in place:
            here = here[step]
        damages = [(json.dumps(new)[:20], new) for new in WRONG[type(here)] if place]
        if isinstance(here, list):
            damages += [("longer", [*here, None]), ("shorter", here[:-1])][: 1 + bool(here)]
        if isinstance(here, dict):
            damages += [("more", {**here, "more\x1b": next(iter(here.values()), 1)})]
            damages += [
                (f"no {gone}", {name: one for name, one in here.items() if name != gone})
                for gone in here
            ]
        for what, new in damages:
            whole = deepcopy(value)
            inner = whole
            for step in place[:-1]:
                inner = inner[step]
            if place:
                inner[place[-1]] = new
            yield f"{'.'.join(map(str, place))}: {what}", whole if place else new


def of_text(text: str) -> Iterator[tuple[str, bytes]]:
    """(damage, bytes) that are no JSON in UTF-8, of the text of an object."""
    data, middle = text.encode(), len(text) // 2
    name, _, rest = text[1:].partition(":")
    for cut in (0, 1, middle, len(text.rstrip()) - 1):
        yield f"cut at {cut}", data[:cut]
    for said in ("1", "null"):
        yield f"twice, {said}", f"{{{name}: {said},{text[1:]}".encode()
    for word in ("NaN", "-Infinity", "1e999", "9" * 5000, "01", "1_0", "'x'", "// 1", "{1: 2}", ""):
        yield f"value {word[:9]}", f'{{"more": {word},{text[1:]}'.encode()
    for opened, closed in ("[]", ('{"a":', "}")):
        yield f"nests {opened}", f'{{"more": {opened * DEEP}1{closed * DEEP},{text[1:]}'.encode()
        yield f"opens {opened}", f'{{"more": {opened * DEEP}{rest}'.encode()
    for kind in ("utf-16", "utf-32-le", "utf-8-sig"):
        yield kind, text.encode(kind)
    for byte in (b"\xff", b"\0"):
        yield f"byte {byte!r}", data[:middle] + byte + data[middle:]
    for more in (b"{}", b"x", b"\0", b"]", data):
        yield f"more behind: {more[:4]!r}", data + more


WAYS = ("link", "link to a link", "nowhere", "loop", "pipe", "folder", "nothing", "no bytes")


def in_the_way(way: str, file: Path) -> None:
    """Put something else in the place of a file."""
    target = file.with_name("elsewhere")
    file.rename(target)
    if way == "link":
        file.symlink_to(target.name)
    elif way == "link to a link":
        file.with_name("between").symlink_to(target)
        file.symlink_to("between")
    elif way in ("nowhere", "loop"):
        file.symlink_to(file.name if way == "loop" else "where nothing is")
    elif way == "pipe":
        os.mkfifo(file)
    elif way == "folder":
        file.mkdir()
    elif way == "no bytes":
        file.touch()


def refusal(read: Callable[[Path], Any], path: Path, named: Path) -> str:
    """What is wrong with a refusal of this file, or `read`; nothing if it is refused as it should be."""
    began = time.process_time()
    try:
        found = read(path)
    except MpitrainError as error:
        text = str(error)
        is_named = error.exit_code == 2 and str(named) in text
        is_short = len(text) < 2000 and text.replace("\n", "").isprintable()
        is_soon = time.process_time() - began < 2
        return "" if is_named and is_short and is_soon else f"refused by {text!r:.300}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return f"read as {str(found)[:100]}"
