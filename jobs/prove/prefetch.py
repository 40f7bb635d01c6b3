"""The exposed time of reading rows, with and without a prefetching thread, in turns; exit code 1 beyond 2 ms a step.

    python jobs/prove/prefetch.py [MIB]

One source sleeps 50 ms for each batch, as a slow disk does. One reads a file of MIB (2048) mebibytes, of which the system has
dropped all pages before each batch. One maps that file, dropped as well, as other programs do: a page fault stops all threads
of Python. One computes 50 ms in Python and so holds the interpreter, as a tokenizer may. A step computes longer than each, in
NumPy. The limit is for the first two; for the others the figures are printed.
"""

import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mpitrain.data import Prefetched, TokenSource
from mpitrain.data.token_files import ArrayTokens, FileTokens, pydocs

READ_S, STEPS, LIMIT_MS = 0.05, 12, 2.0


class Slow(TokenSource):
    """A source of tokens with a delay before each batch."""

    def __init__(self, delay, tokens=None, context=64):
        super().__init__(pydocs() if tokens is None else tokens, 1 << 16, context, "tokens")
        self._delay = delay

    def batch(self, *arguments):
        self._delay()
        return super().batch(*arguments)


def holds():
    until = time.thread_time() + READ_S
    while time.thread_time() < until:
        pass


def dropped(file):
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def large_file(folder, mib):
    path = Path(folder) / "large.bin"
    block = np.random.default_rng(0).integers(0, 1 << 16, 1 << 19, np.uint16)
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(block.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


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


def sources(folder, mib):
    path = large_file(folder, mib)
    file, count = path.open("rb"), mib << 19
    yield "sleeps 50 ms", True, lambda: Slow(lambda: time.sleep(READ_S))
    read = lambda: FileTokens(path, np.dtype(np.uint16), 0, count)  # noqa: E731
    yield f"{mib} MiB read, dropped", True, lambda: Slow(lambda: dropped(file), read(), 1024)

    def mapped():
        with path.open("rb") as opened:
            view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(view, np.uint16)

        def unmapped():
            view.madvise(mmap.MADV_DONTNEED)
            dropped(file)

        return Slow(unmapped, ArrayTokens(array), 1024)

    yield f"{mib} MiB mapped, dropped", False, mapped
    yield "holds the interpreter", False, lambda: Slow(holds)


def main():
    matrix, failed = np.ones((700, 700), np.float32), False
    print(f"{'source':26}{'plain ms':>10}{'prefetched ms':>15}{'limit ms':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, has_limit, opened in sources(folder, int([*sys.argv[1:], "2048"][0])):
            plain = exposed_ms(opened(), matrix)
            source = Prefetched(opened(), 2, STEPS)
            ahead = exposed_ms(source, matrix)
            source.close()
            limit = f"{LIMIT_MS:g}" if has_limit else "-"
            print(f"{name:26}{plain:10.2f}{ahead:15.2f}{limit:>10}", flush=True)
            failed |= has_limit and not ahead <= LIMIT_MS
    return failed


if __name__ == "__main__":
    sys.exit(main())
