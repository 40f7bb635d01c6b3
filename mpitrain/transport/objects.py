"""Messages of any picklable value from one rank to another: its length, then its bytes."""

import pickle
from typing import Any

import numpy as np

from mpitrain.transport.base import Request, Transport


def send_object(transport: Transport, value: Any, to: int, tag: int = 0) -> None:
    for request in start_send_object(transport, value, to, tag):
        request.wait()


def start_send_object(transport: Transport, value: Any, to: int, tag: int = 0) -> list[Request]:
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    length = np.array([data.size], np.int64)
    return [transport.start_send(array, to, tag) for array in (length, data)]


def recv_object(transport: Transport, source: int, tag: int = 0) -> Any:
    length = np.empty(1, np.int64)
    transport.recv(length, source, tag)
    return recv_bytes(transport, int(length[0]), source, tag)


def recv_bytes(transport: Transport, length: int, source: int, tag: int) -> Any:
    """Receive a value whose length has arrived."""
    data = np.empty(length, np.uint8)
    transport.recv(data, source, tag)
    return pickle.loads(data.tobytes())
