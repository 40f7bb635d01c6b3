"""The limits of a multiprocessor, which give the number of resident blocks (the occupancy)."""

from typing import NamedTuple

GRAIN = 8  # registers of a thread are allocated in multiples of this


class Multiprocessor(NamedTuple):
    """The limits of a multiprocessor, for all resident blocks together.

    shared    bytes of shared memory
    reserved  bytes of shared memory that each block takes in addition to its own
    """

    threads: int
    registers: int
    shared: int
    reserved: int
    blocks: int

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Return the number of blocks that run at the same time; at least 1.

        threads    per block
        registers  per thread
        shared     bytes of shared memory per block
        """
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
"""Compute capability 9.0: tilings are chosen for it where no device reports its limits."""
