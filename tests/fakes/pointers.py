"""Ranks as threads that, like a CUDA-aware MPI, take an array's pointer and never the array."""

import ctypes
from contextlib import nullcontext

import numpy as np

from mpitrain.machine.backend import on_device
from mpitrain.transport.threads import ThreadTransport
from tests.fakes import cupy


def behind_pointer(array, only_reads=False):
    """The memory that `__cuda_array_interface__` points to, as MPI would see it."""
    if not on_device(array) or not array.flags.c_contiguous:
        return array
    with cupy.only_reads() if only_reads else nullcontext():
        facts = array.__cuda_array_interface__
    nbytes = int(np.prod(facts["shape"])) * np.dtype(facts["typestr"]).itemsize
    memory = (ctypes.c_ubyte * nbytes).from_address(facts["data"][0])
    memory.owner = array  # a message keeps its array alive, as mpi4py's requests do
    raw = np.frombuffer(memory, np.uint8) if nbytes else np.empty(0, np.uint8)
    return raw.view(facts["typestr"]).reshape(facts["shape"])


class PointerThreads(ThreadTransport):
    """A rank that is a thread, and looks through pointers; it takes the place of another transport."""

    def __init__(self, rank):
        vars(self).update(vars(rank))

    def start_send(self, array, to, tag=0):
        return super().start_send(behind_pointer(array, only_reads=True), to, tag)

    def start_recv(self, array, source, tag=0):
        return super().start_recv(behind_pointer(array), source, tag)

    def start_all_reduce(self, array, op):
        return super().start_all_reduce(behind_pointer(array), op)
