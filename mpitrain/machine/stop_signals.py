"""The signals by which a batch job asks a program of the user to stop, noted on this rank."""

import atexit
import signal
import threading

_noted: list[int] = []


def note(*numbers: signal.Signals) -> None:
    """Note these signals from now on, except those for which the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python installs handlers in the main thread alone.
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, frame: _noted.append(number))
            signal.siginterrupt(number, False)  # A program that knows nothing of it goes on.
            # Python removes its handlers before MPI_Finalize: a late signal would end this rank.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def are_noted() -> bool:
    return bool(_noted)
