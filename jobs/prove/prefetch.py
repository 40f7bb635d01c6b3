"""The exposed time of reading rows, with and without a prefetching thread, in turns; exit code 1 beyond 2 ms a step.

A source sleeps 50 ms for each batch, as a slow disk does; another computes as long in Python and so holds the interpreter, as a
tokenizer may. A step computes longer than either, in NumPy. For the second source the figures are printed without a limit.
"""

import sys
import time

import numpy as np

from mpitrain.data import Prefetched, TokenSource
from mpitrain.data.token_files import pydocs

READ_S, STEPS, LIMIT_MS = 0.05, 12, 2.0


class Slow(TokenSource):
    """A source of bytes with a delay before each batch."""

    def __init__(self, delay):
        super().__init__(pydocs(), 256, 64, "pydocs")
        self._delay = delay

    def batch(self, *arguments):
        self._delay()
        return super().batch(*arguments)


def holds():
    until = time.thread_time() + READ_S
    while time.thread_time() < until:
        pass


def exposed_ms(source, matrix):
    """Median time of a step that goes on rows, from the third step on."""
    waits = []
    for step in range(STEPS):
        began = time.perf_counter()
        source.batch(0, step, 8, range(8))
        waits.append(time.perf_counter() - began)
        until = time.perf_counter() + 2 * READ_S
        while time.perf_counter() < until:
            matrix @ matrix
    return 1e3 * float(np.median(waits[2:]))


def main():
    matrix, failed = np.ones((700, 700), np.float32), False
    print(f"{'source':24}{'plain ms':>10}{'prefetched ms':>15}")
    for name, delay in (
        ("sleeps 50 ms", lambda: time.sleep(READ_S)),
        ("holds the interpreter", holds),
    ):
        plain = exposed_ms(Slow(delay), matrix)
        source = Prefetched(Slow(delay), 2, STEPS)
        ahead = exposed_ms(source, matrix)
        source.close()
        print(f"{name:24}{plain:10.2f}{ahead:15.2f}")
        failed |= name.startswith("sleeps") and not ahead <= LIMIT_MS
    return failed


if __name__ == "__main__":
    sys.exit(main())
