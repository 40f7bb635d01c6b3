"""Programs of schedules on threads that send real messages: when receives begin, and how long arrays are held."""

import threading
import weakref

import numpy as np
import pytest

from mpitrain.layers.base import READING
from mpitrain.machine.backend import Arena
from mpitrain.pipeline.pipeline import Channel, Executor, MicroBatch
from mpitrain.pipeline.schedules import (
    SCHEDULES,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    needed,
    plan_of,
    with_messages,
)
from mpitrain.transport.threads import run_ranks


def shape(micro):
    """Ragged: a message that comes out of turn has another size."""
    return 1 + micro % 3


class Written:
    """A stage that writes down what it computes."""

    def __init__(self, notes, chunk):
        self.notes, self.chunk = notes, chunk

    def forward(self, micro, now, x):
        self.notes.append((Forward, self.chunk, micro))
        return 3 * x + self.chunk

    def backward_input(self, micro, dy):
        self.notes.append((BackwardInput, self.chunk, micro))
        return dy + 1

    def backward_weight(self, micro):
        self.notes.append((BackwardWeight, self.chunk, micro))

    def backward(self, micro, dy):
        self.notes.append((Backward, self.chunk, micro))
        return dy + 1


class Noting(Channel):
    """A channel that writes down what it begins and what a stage waits for."""

    notes: list

    def receive(self, message, *rest):
        self.notes.append(("receive", message))
        super().receive(message, *rest)

    def complete(self, message):
        self.notes.append(("complete", message))
        return super().complete(message)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_receive_begins_before_the_instruction_that_precedes_its_use(name):
    plan = plan_of(name, 3, 6)
    parts, used = len(plan.stage_of), {}

    def run(transport):
        channel = Noting(transport, Arena(), np.float64, lambda chunk, inputs: inputs)
        channel.notes = notes = []
        stages = {
            chunk: Written(notes, chunk)
            for chunk, home in enumerate(plan.stage_of)
            if home == transport.rank
        }
        micros = [MicroBatch(micro, READING, np.full(shape(micro), 1.0)) for micro in range(6)]
        Executor(stages, parts, channel, np.copy).execute(
            with_messages(plan)[transport.rank], micros, lambda micro, y: y + 7
        )
        return notes

    for notes in run_ranks(3, run):
        computed = [index for index, note in enumerate(notes) if isinstance(note[0], type)]
        for turn, index in enumerate(computed):
            kind, *where = notes[index]
            message = needed(kind(*where), parts)
            if ("receive", message) in notes:
                assert notes.index(("receive", message)) < computed[max(0, turn - 1)]
                used[message] = True
    assert len(used) == sum(isinstance(i, Receive) for mine in with_messages(plan) for i in mine)


def test_a_send_blocks_nobody_and_its_array_is_held_until_it_is_complete():
    begun = threading.Event()

    def run(transport):
        channel = Channel(transport, Arena(), np.float64, lambda chunk, inputs: inputs)
        if transport.rank:
            assert begun.wait(60), "the receive is not there before the sender has gone on"
            channel.receive(("activation", 1, 0), 0, (1_000_000,))
            return channel.complete(("activation", 1, 0)).sum()
        array = np.ones(1_000_000)
        held = weakref.ref(array)
        channel.send(("activation", 1, 0), array, 1)
        del array
        begun.set()
        assert held() is not None
        channel.complete(("activation", 1, 0))
        return held()

    assert run_ranks(2, run) == [None, 1_000_000]
