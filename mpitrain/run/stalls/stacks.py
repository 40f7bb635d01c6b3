"""Python stacks of the threads of this process."""

import sys
import threading
import traceback

DEEPEST = 40
"""Largest number of frames of a thread."""
THREADS = 32
"""Largest number of threads."""


def stacks(main: int) -> dict[str, list[str]]:
    """Return the innermost frames of each thread but the calling one.

    main     number of the thread that comes first
    returns  {name of the thread: frames as text, the most recent call last}
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return {
        f"{names.get(ident, 'thread')} ({ident})": traceback.format_stack(frame)[-DEEPEST:]
        for ident, frame in frames[:THREADS]
        if ident != own
    }
