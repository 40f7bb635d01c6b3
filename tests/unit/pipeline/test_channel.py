"""A channel tests each message until it is complete, and no longer; it keeps no array after that."""

import weakref
from types import SimpleNamespace

import numpy as np

from mpitrain.machine.backend import Arena
from mpitrain.pipeline.pipeline import Channel
from mpitrain.trace.recorder import SILENT


class Message:
    """A request that is complete at its `tests`-th test, or when it is waited for."""

    source = -1

    def __init__(self, array, tests):
        self.array, self.left, self.calls = array, tests, 0

    def test(self):
        self.calls += 1
        self.left -= 1
        return self.left <= 0

    def wait(self):
        self.left = 0


def channel_of(tests):
    """A channel over a transport whose messages need this many tests, and the list of them."""
    started = []

    def start(array, peer, tag):
        started.append(Message(array, tests))
        return started[-1]

    transport = SimpleNamespace(
        recorder=SILENT, members=(0, 1), traffic=SimpleNamespace(content="")
    )
    transport.start_send = transport.start_recv = start
    channel = Channel(transport, Arena(), np.float32, lambda chunk, shape: shape)
    return channel, started


def test_a_message_is_tested_until_it_is_complete_and_no_longer():
    channel, started = channel_of(3)
    array = np.zeros((4, 3), np.float32)
    channel.send(("activation", 1, 0), array, 1)
    channel.receive(("gradient", 0, 0), 1, (4, 3))
    for _ in range(10):
        channel.poll()
    assert [message.calls for message in started] == [3, 3]
    channel.complete(("activation", 1, 0))
    assert channel.complete(("gradient", 0, 0)).shape == (4, 3)


def test_a_message_that_was_waited_for_is_not_tested_again():
    channel, started = channel_of(99)
    channel.receive(("gradient", 0, 0), 1, (4, 3))
    channel.poll()
    message = weakref.ref(started.pop())
    channel.complete(("gradient", 0, 0))
    assert message() is None
    channel.send(("activation", 1, 0), np.zeros((4, 3), np.float32), 1)
    channel.complete(("activation", 1, 0))
    channel.poll()
    assert started.pop().calls == 0
