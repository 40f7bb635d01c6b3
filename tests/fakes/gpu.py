"""Kernels for the fake GPU: run by the simulator on what the stream will find, and seen once the stream was waited for."""

import sys
import threading
from collections import defaultdict

from mpitrain.kernels.loader import Argument, Kernels
from mpitrain.kernels.simulator.machine import Simulator
from mpitrain.ops.device import KERNELS
from tests.fakes import cupy


class FakeEngine:
    """Launches kernels on tests.fakes.cupy arrays.

    noted   by thread, what it has launched: kernel, blocks, threads, and each argument as an address or a number
    prepared  by thread, the sources and macros that it was to compile
    streams by thread and launch: whether the current stream was one of messages
    """

    def __init__(self):
        self._simulator = Simulator()
        simulated = self._simulator
        self.capability, self.multiprocessors = simulated.capability, simulated.multiprocessors
        self.multiprocessor = simulated.multiprocessor
        self.noted, self.streams = defaultdict(list), defaultdict(list)
        self.prepared = defaultdict(list)

    name, takes_plain, has_wgmma = "a fake GPU", False, False

    def prepare(self, source, defines, waits):
        self.prepared[threading.get_ident()].append((source.path.stem, tuple(defines.items())))

    def load(self, source, signature, defines):
        function = self._simulator.load(source, signature, defines)

        def start(grid, block, arguments, shared):
            self.streams[threading.get_ident()].append(cupy.get_current_stream().non_blocking)
            self.noted[threading.get_ident()].append(
                (
                    signature.name,
                    tuple(defines.items()),
                    *grid,
                    *block,
                    shared,
                    *map(_passed, arguments),
                )
            )
            arrays = [
                (a.array, p.is_readonly)
                for a, p in zip(arguments, signature.parameters, strict=True)
                if isinstance(a, Argument) and a.array is not None
            ]
            plain = [
                a._replace(array=None if a.array is None else a.array.truth)
                if isinstance(a, Argument)
                else a
                for a in arguments
            ]
            cupy.launch(
                [a for a, is_readonly in arrays if not is_readonly],
                [a for a, _ in arrays],
                lambda: function(grid, block, plain, shared),
            )

        return start

    def multiply(self, a, b, c, transposed_a, transposed_b, accumulate):
        if cupy.get_current_stream().captures is not None:  # as CuPy does
            raise NotImplementedError(
                "calling cuBLAS API during stream capture is currently unsupported"
            )
        truths = (a.truth, b.truth, c.truth)
        cupy.launch(
            [c],
            [a, b],
            lambda: self._simulator.multiply(*truths, transposed_a, transposed_b, accumulate),
        )


def _passed(argument):
    if not isinstance(argument, Argument):
        return argument
    return None if argument.array is None else ("at", argument.array.data.ptr)


def kernels():
    """All kernels, on the fake GPU."""
    return Kernels(FakeEngine())


def play(monkeypatch):
    """A machine with a GPU: the fake one, whose kernels the simulator runs."""
    made = kernels()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy, "kernels_alone", True)
    monkeypatch.setitem(KERNELS, "cuda", lambda: made)
    cupy.faults.clear()
