"""Decorators of a transport pass on every call and every attribute of the protocol."""

import inspect

import pytest

from mpitrain.transport.base import Transport
from mpitrain.transport.decorators import Forwarding

ARGUMENTS = {"requests": [None], "color": 0}
"""Arguments of protocol calls; any other parameter gets None."""


class Spy:
    """A transport that notes the names of its calls; each attribute is an object of its own."""

    def __init__(self):
        self.calls = []
        for name in Transport.__annotations__:
            setattr(self, name, object())

    def __getattr__(self, name):
        def note(*arguments, **more):
            self.calls.append(name)
            return self

        return note

    def wait(self):
        """Stand for a request, too."""


class Passing(Forwarding):
    def over(self, inner):
        return type(self)(inner)


def public_calls():
    return [
        name
        for name, member in vars(Transport).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]


def reaches(name):
    """Whether a call of a decorator that changes nothing reaches the transport inside it."""
    spy = Spy()
    call = getattr(Passing(spy), name)
    call(**{key: ARGUMENTS.get(key) for key in inspect.signature(call).parameters})
    return bool(spy.calls)


def test_every_call_of_the_protocol_reaches_the_inner_transport():
    assert len(public_calls()) >= 20
    assert [name for name in public_calls() if not reaches(name)] == []


def test_a_call_that_the_protocol_gains_is_missed(monkeypatch):
    monkeypatch.setattr(Transport, "teleport", lambda self, key: None, raising=False)
    assert [name for name in public_calls() if not reaches(name)] == ["teleport"]


def test_a_call_without_its_forwarding_is_missed(monkeypatch):
    for name in vars(Forwarding).keys() & {*public_calls()}:
        with monkeypatch.context() as patched:
            patched.delattr(Forwarding, name)
            assert not reaches(name), name


def test_every_attribute_of_the_protocol_is_the_inner_transport_s():
    spy = Spy()
    passing = Passing(spy)
    for name in Transport.__annotations__:
        assert getattr(passing, name) is getattr(spy, name), name


@pytest.mark.parametrize("call", ["send", "recv", "exchange", "wait_any"])
def test_a_blocking_call_is_made_of_the_decorator_s_own_calls(call):
    assert call not in vars(Forwarding)


def test_a_split_transport_has_the_same_decorator_and_none_stays_none():
    spy = Spy()
    assert isinstance(Passing(spy).split(0), Passing)
    spy.split = lambda color, key: None
    assert Passing(spy).split(None) is None
