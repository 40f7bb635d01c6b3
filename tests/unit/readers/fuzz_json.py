"""JSON files that are damaged by a generator: it knows from a description of the format which
damage leaves a file valid.

A description is a class with `holds(value)` for a leaf, a dict of descriptions for an object
(`Each` where any name may stand),
a list of one for an array of any length, or a tuple for one of so many.
"""

import json
from copy import deepcopy
from typing import Any, NamedTuple

MARK = "\N{SNOWMAN}"
"""A name or text that a damage puts where `json` would not write what it wants."""
DEEP = 100_000
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    0.5,
    -0.5,
    1.0,
    1e300,
    -1e300,
    2**31,
    2**63,
    2**64,
    10**400,
    "",
    "x",
    "7",
    "1_0",
    "\ud800",
    [],
    [1],
    [[1, 2]],
    {},
    {"a": 1},
]
CONSTANTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5000,
    "01",
    "1_0",
    "'x'",
    "// 1",
    "{1: 2}",
    "[1,]",
    "",
]


class Int(NamedTuple):
    """Whole numbers in a range."""

    least: int
    most: int

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.least <= value <= self.most


class Number(NamedTuple):
    """Numbers in a range."""

    least: float
    most: float

    def holds(self, value: Any) -> bool:
        return type(value) in (int, float) and self.least <= value <= self.most


class Text(NamedTuple):
    """Texts; of a few, if they are named."""

    among: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        return (
            isinstance(value, str)
            and (not self.among or value in self.among)
            and value.isprintable()
        )


class Each(NamedTuple):
    """An object whose names `name` holds, with values of one description."""

    name: Any
    value: Any


class Anything(NamedTuple):
    """Whatever JSON has."""

    def holds(self, value: Any) -> bool:
        return True


class Open(NamedTuple):
    """An object with these names at least."""

    named: dict[str, Any]


class Null(NamedTuple):
    """Null, or what the description holds."""

    other: Any


class Fixed:
    """A leaf that must stay as it is, for something else in the file fits it."""

    def __repr__(self) -> str:
        return "Fixed()"

    def holds(self, value: Any) -> bool:
        return True


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value is as described."""
    if isinstance(wanted, Null):
        return value is None or fits(value, wanted.other)
    if isinstance(wanted, Each):
        return isinstance(value, dict) and all(
            wanted.name.holds(name) and fits(one, wanted.value) for name, one in value.items()
        )
    if isinstance(wanted, Open):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], one) for name, one in wanted.named.items()
        )
    if isinstance(wanted, dict):
        return (
            isinstance(value, dict)
            and value.keys() == wanted.keys()
            and all(fits(value[name], wanted[name]) for name in wanted)
        )
    if isinstance(wanted, list):
        return isinstance(value, list) and all(fits(one, wanted[0]) for one in value)
    if isinstance(wanted, tuple) and type(wanted) is tuple:
        return (
            isinstance(value, list) and len(value) == len(wanted) and all(map(fits, value, wanted))
        )
    return wanted.holds(value)


def is_fixed(wanted: Any) -> bool:
    """Whether there is something below that must stay as it is."""
    if isinstance(wanted, Open):
        wanted = wanted.named
    if isinstance(wanted, dict):
        return any(map(is_fixed, wanted.values()))
    if isinstance(wanted, list) or type(wanted) is tuple:
        return any(map(is_fixed, wanted))
    return isinstance(wanted, Fixed) or is_fixed(
        getattr(wanted, "other", None) or getattr(wanted, "value", None) or ()
    )


def says(value: Any, wanted: Any, before: Any) -> bool:
    """Whether a value may stand where another one did."""
    return json.dumps(value) == json.dumps(before) or (not is_fixed(wanted) and fits(value, wanted))


def nodes(value: Any, wanted: Any, place: tuple = ()) -> list[tuple[tuple, Any]]:
    """Every place below the top, and what is wanted there."""
    found = [(place, wanted)] if place else []
    inner = wanted.other if isinstance(wanted, Null) else wanted
    if isinstance(inner, Open):
        inner = {**dict.fromkeys(value, Anything()), **inner.named}
    if isinstance(value, dict) and isinstance(inner, Each | dict):
        for name in value:
            found += nodes(
                value[name], inner.value if isinstance(inner, Each) else inner[name], (*place, name)
            )
    elif isinstance(value, list) and (isinstance(inner, list) or type(inner) is tuple):
        for index, one in enumerate(value):
            found += nodes(
                one, inner[0] if isinstance(inner, list) else inner[index], (*place, index)
            )
    return found


def at(value: Any, place: tuple) -> Any:
    for step in place:
        value = value[step]
    return value


def put(value: Any, place: tuple, new: Any) -> Any:
    """A copy with something else in a place."""
    value = deepcopy(value)
    at(value, place[:-1])[place[-1]] = new
    return value


def objects(value: Any, place: tuple = ()) -> list[tuple]:
    """The places of all objects with names in them."""
    steps = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = [inner for step, one in steps for inner in objects(one, (*place, step))]
    return [place, *found] if isinstance(value, dict) and value else found


def one_of(rng: Any, places: list[tuple[tuple, Any]]) -> tuple[tuple, Any]:
    """A place: one of each kind is as likely as any of another, however many there are."""
    kind = rng.choice(sorted({(len(place), repr(leaf)) for place, leaf in places}))
    return rng.choice([(place, leaf) for place, leaf in places if (len(place), repr(leaf)) == kind])


def of_another_type(rng: Any, value: Any, wanted: Any) -> tuple[Any, bool]:
    place, leaf = one_of(rng, nodes(value, wanted))
    before = at(value, place)
    alike = [str(before), float(before)] if isinstance(before, int) and before < 2**53 else []
    new = rng.choice(alike) if alike and rng.random() < 0.5 else rng.choice(VALUES)
    changed = put(value, place, new)
    return changed, says(new, leaf, at(value, place)) and _is_text(changed)


def out_of_range(rng: Any, value: Any, wanted: Any) -> tuple[Any, bool]:
    """A number beside, or at, an end of its range."""
    numbers = [
        (place, leaf) for place, leaf in nodes(value, wanted) if isinstance(leaf, Int | Number)
    ]
    if not numbers:
        return of_another_type(rng, value, wanted)
    place, leaf = one_of(rng, numbers)
    step = 1 if isinstance(leaf, Int) else max(abs(leaf.most), 1.0) / 64
    new = rng.choice(
        [leaf.least - step, leaf.least, leaf.most, leaf.most + step, -leaf.most - step]
    )
    return put(value, place, new), fits(new, leaf)


def missing(rng: Any, value: Any, wanted: Any) -> tuple[Any, bool]:
    place = rng.choice(objects(value))
    value = deepcopy(value)
    inner = at(value, place)
    del inner[rng.choice(sorted(inner))]
    return value, fits(value, wanted)


def unknown(rng: Any, value: Any, wanted: Any) -> tuple[Any, bool]:
    place = rng.choice(objects(value))
    value = deepcopy(value)
    inner = at(value, place)
    inner[rng.choice(["more", "", "\x1b[2J", "__class__", "0", "-1", "1_0", "٢"])] = rng.choice(
        [None, 1, *inner.values()]
    )
    return value, fits(value, wanted)


def of_another_length(rng: Any, value: Any, wanted: Any) -> tuple[Any, bool]:
    """A list that has one more, one less or nothing; an object that is a list, where there are no
    lists.
    """
    lists = [
        (place, leaf) for place, leaf in nodes(value, wanted) if isinstance(at(value, place), list)
    ]
    place, leaf = rng.choice(lists or nodes(value, wanted))
    before = at(value, place)
    listed = rng.choice([[], before[:-1], before + before[-1:], [*before, None]]) if lists else []
    return put(value, place, listed), says(listed, leaf, before)


def _is_text(value: Any) -> bool:
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


OF_VALUES = {
    "type": of_another_type,
    "range": out_of_range,
    "missing": missing,
    "unknown": unknown,
    "length": of_another_length,
}
"""Damages to what a file says: (generator, value, description) -> (the damaged value, whether it is
as described).
"""


def written_twice(rng: Any, value: Any, text: Any) -> bytes:
    """A text in which an object has a name twice, with the same value or another one."""
    place = rng.choice(objects(value))
    value = deepcopy(value)
    inner = at(value, place)
    name = rng.choice(sorted(inner))
    inner[MARK] = inner[name] if rng.random() < 0.5 else rng.choice(list(inner.values()))
    return text(value).replace(json.dumps(MARK), json.dumps(name)).encode()


def nested(rng: Any, value: Any, text: Any) -> bytes:
    opened, closed = rng.choice(["[]", ['{"a":', "}"]])
    places = [(*place, name) for place in objects(value) for name in at(value, place)]
    marked = put(value, rng.choice(places), MARK)
    return (
        text(marked)
        .replace(json.dumps(MARK), opened * DEEP + "1" + rng.choice(["", closed * DEEP]))
        .encode()
    )


def not_json(rng: Any, value: Any, text: Any) -> bytes:
    places = [(*place, name) for place in objects(value) for name in at(value, place)]
    marked = put(value, rng.choice(places), MARK)
    return text(marked).replace(json.dumps(MARK), rng.choice(CONSTANTS)).encode()


def cut_off(rng: Any, value: Any, text: Any) -> bytes:
    whole = text(value).rstrip().encode()
    return whole[: rng.randrange(len(whole))]


def of_another_encoding(rng: Any, value: Any, text: Any) -> bytes:
    whole = text(value)
    place = rng.randrange(len(whole.encode()))
    return rng.choice(
        [
            whole.encode("utf-16"),
            whole.encode("utf-32-le"),
            b"\xef\xbb\xbf" + whole.encode(),
            whole.encode()[:place] + bytes([rng.randrange(128, 256)]) + whole.encode()[place:],
            whole.encode()[:place] + b"\0" + whole.encode()[place:],
        ]
    )


def with_more_behind(rng: Any, value: Any, text: Any) -> bytes:
    return text(value).encode() + rng.choice([b"{}", b"x", b"\0", b"]", text(value).encode()])


OF_TEXTS = {
    "truncation": cut_off,
    "duplicate": written_twice,
    "nesting": nested,
    "no JSON": not_json,
    "encoding": of_another_encoding,
    "more behind": with_more_behind,
}
"""Damages to the text: (generator, value, how it is written) -> bytes, which are never valid."""
