"""The test whether MPI can send GPU memory: ask the library, then try it in a child process.

A wrong yes of the library causes a segmentation fault or wrong numbers, not an error code.
Therefore a child process makes the trial. The child starts MPI alone and sends GPU memory to
itself. It proves that the library can read and write such memory. It does not test the links
between hosts.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.machine import process
from mpitrain.machine.backend import Backend, DeviceBackend, on_device
from mpitrain.machine.cuda import CudaBackend
from mpitrain.transport.base import Transport
from mpitrain.transport.device.messages import DeviceTransport, Direct
from mpitrain.transport.device.staging import Staged
from mpitrain.transport.library import Awareness, cuda_awareness, loaded_path

COUNTS = (1, 1001, 1 << 20)
"""Floats per message of the self-test.

They are a small (eager) message, an odd length, and a large message that MPI sends by rendezvous.
"""

WRONG = 3  # exit code of a self-test that received wrong data
CHILD = (sys.executable, "-m", "mpitrain.transport.device.cuda_aware")
SECONDS = 120.0


def over_device(transport: Transport, backend: Backend, cuda_aware: str) -> Transport:
    """Return a transport that carries the backend's arrays as device.cuda_aware demands;
    collective.
    """
    if not isinstance(backend, DeviceBackend):
        return transport
    aware = cuda_messages(transport, cuda_aware)
    carrier = Direct(transport, backend) if aware.cuda else Staged(transport, backend)
    return DeviceTransport(transport, backend, carrier)


def cuda_messages(transport: Transport, setting: str) -> Awareness:
    """Decide whether GPU pointers go to MPI, and why: the same answer on every rank. Collective.

    setting  device.cuda_aware: "yes" and "no" are final; "auto" queries and tests MPI on one rank
             of each host
    """
    if setting != "auto":
        return Awareness(setting == "yes", f"device.cuda_aware = {setting}")
    awareness = None
    if transport.hosts.index(transport.hosts[transport.rank]) == transport.rank:
        awareness = cuda_awareness(loaded_path(), process.environment())
        proven = self_test(CHILD, process.environment_of_one(), SECONDS) if awareness.cuda else None
        awareness = (
            Awareness(proven.cuda, f"says {awareness.how}, {proven.how}")
            if proven
            else Awareness(False, f"says {awareness.how}")
        )
    answers = [Awareness(*answer) for answer in transport.gather_text(awareness) if answer]
    return next((answer for answer in answers if not answer.cuda), answers[0])


def self_test(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Awareness:
    """Run the child; a crash, wrong data, a timeout and any other failure mean no."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Awareness(False, f"but a self-test was still waiting after {seconds:g} s")
    if done.returncode == 0:
        return Awareness(True, "and a self-test moved GPU memory")
    if done.returncode == WRONG:
        return Awareness(False, "but a self-test received wrong data")
    if done.returncode < 0:
        return Awareness(
            False, f"but a self-test crashed ({signal.Signals(-done.returncode).name})"
        )
    lines = done.stderr.strip().splitlines()
    return Awareness(
        False,
        f"but a self-test failed: {lines[-1].strip() if lines else f'exit code {done.returncode}'}",
    )


def exchange_is_right(transport: Transport, backend: DeviceBackend) -> bool:
    """Send device memory from this rank to itself, and compare the data."""
    for count in COUNTS:
        sent = np.arange(count, dtype=np.float32) + 1
        outgoing, incoming = backend.from_host(sent), backend.zeros(count, np.float32)
        transport.exchange(outgoing, transport.rank, incoming, transport.rank)
        if not (on_device(incoming) and np.array_equal(backend.to_host(incoming), sent)):
            return False
    return True


def main() -> None:
    """Run the self-test: the entry point of the child process."""
    from mpitrain.transport.mpi import connect

    process.choose_gpu("cuda")
    try:
        backend = CudaBackend()
    except ConfigError as error:
        sys.exit(error.law)
    transport = connect()
    right = exchange_is_right(
        DeviceTransport(transport, backend, Direct(transport, backend)), backend
    )
    sys.exit(0 if right else WRONG)


if __name__ == "__main__":
    main()
