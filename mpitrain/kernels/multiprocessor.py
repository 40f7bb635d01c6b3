"""What a device's multiprocessor has room for."""

from typing import NamedTuple

GRAIN = 8  # registers of a thread come in so many at a time


class Multiprocessor(NamedTuple):
    """Its limits: what the blocks that run on it at a time have together.

    shared    bytes of shared memory
    reserved  bytes of it that each block takes beside its own
    """

    threads: int
    registers: int
    shared: int
    reserved: int
    blocks: int

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """How many blocks run at a time, of so many threads, registers a thread and bytes of shared memory each; at least 1."""
        taken = -(-registers // GRAIN) * GRAIN * threads
        return max(
            1,
            min(
                self.threads // threads,
                self.registers // taken,
                self.shared // (shared + self.reserved),
                self.blocks,
            ),
        )


H100 = Multiprocessor(threads=2048, registers=65536, shared=228 << 10, reserved=1 << 10, blocks=32)
"""Of compute capability 9.0: what tilings are chosen for where no device says."""
