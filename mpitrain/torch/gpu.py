"""CUDA tensors of a process group: our collectives in GPU memory, on a stream of the group.

A call begins behind what the caller's stream had to do, and the stream that waits for the call goes on
behind its last copy. The host waits for neither:

    caller's stream   gradients | other work ...           | wait: reads the sum
                         before v                    after ^
    group's stream              | copy, reduction, copy    |

Buffers are CuPy's, so within a host ranks read each other's memory (CUDA IPC). Between hosts MPI gets
pointers if it is CUDA-aware; otherwise messages are staged in page-locked host memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpitrain.collectives.engine.arithmetic import by_kernels
from mpitrain.collectives.group import Group
from mpitrain.collectives.selection.tuning import Tuning
from mpitrain.errors import MpitrainError, say
from mpitrain.machine.cuda import cupy_with_gpu
from mpitrain.ops.device import KERNELS, backend_for
from mpitrain.transport.base import Transport
from mpitrain.transport.device import Direct, Staged, cuda_messages

KERNEL_OPS = "add", "maximum"
"""The operators that our kernels have for bfloat16, which CuPy cannot reduce."""


class GpuSide:
    """This rank's GPU in a process group: its stream, and the group over GPU memory; collective.

    is_direct  whether MPI gets pointers to GPU memory
    carries    whether our collectives take GPU memory. They need CuPy on all ranks; without it tensors
               are copied to host memory as a whole
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        cuda_aware: str,
        algorithm: str,
        tuning: Tuning | None,
    ):
        self._device, self.stream = device, torch.cuda.Stream(device)
        self.is_direct, problem = False, ""
        try:
            cupy = cupy_with_gpu()
            cupy.cuda.Device(device.index or 0).use()
            self._backend: Any = backend_for("cuda")
            kernels = KERNELS["cuda"]()
        except Exception as error:  # Whatever it is, the other ranks wait for this one's text.
            problem = error.law if isinstance(error, MpitrainError) else repr(error)
        problems = [each for each in transport.gather_text(problem) if each]
        self.carries = not problems
        if not self.carries:
            _say_once(transport, f"CUDA tensors are copied through host memory: {problems[0]}")
            return
        self._cupy = cupy
        self.is_direct, how = cuda_messages(transport, cuda_aware)
        if not self.is_direct:
            text = "messages of CUDA tensors are staged in host memory, as this MPI gets no pointers to it"
            _say_once(transport, f"{text}: {how}.")
        kind: Any = Direct if self.is_direct else Staged
        self.transport = kind(transport, self._backend)
        arithmetic = by_kernels(kernels, self._backend.holds, self._backend.arena())
        self.group = Group(self.transport, algorithm, tuning, arithmetic)

    @contextmanager
    def here(self, before: Any) -> Iterator[None]:
        """Let PyTorch and CuPy work on the group's stream in this block, behind an event."""
        self.stream.wait_event(before)
        with torch.cuda.stream(self.stream):
            if not self.carries:
                yield
                return
            self._cupy.cuda.Device(self._device.index or 0).use()
            with self._cupy.cuda.ExternalStream(self.stream.cuda_stream):
                yield

    def reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Return whether arrays of a dtype can be reduced by an operator in GPU memory."""
        return self.carries and (dtype != torch.bfloat16 or op in KERNEL_OPS)

    def bytes_of(self, tensor: torch.Tensor) -> Any:
        """Return the bytes of a contiguous CUDA tensor as a CuPy array, which keeps it alive."""
        cuda, nbytes = self._cupy.cuda, tensor.numel() * tensor.element_size()
        memory = cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, self._device.index or 0)
        return self._cupy.ndarray((nbytes,), np.uint8, cuda.MemoryPointer(memory, 0))


def tensor_of(array: Any) -> torch.Tensor:
    """Return the memory of a CuPy array of bytes as a tensor."""
    tensor: torch.Tensor = torch.from_dlpack(array)
    return tensor


_SAID: set[str] = set()


def _say_once(transport: Transport, text: str) -> None:
    if transport.members[transport.rank] == 0 and text not in _SAID:
        _SAID.add(text)
        say(f"mpitrain.torch: {text}")
