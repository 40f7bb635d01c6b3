"""Gossip: after each step a worker averages its parameters with those of one neighbour, and neighbours change."""

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.parallel.averaging.base import ModelAveraging
from mpitrain.parallel.replication.protocol import ReplicationContext


def distances(n: int) -> list[int]:
    """How far away neighbours are in successive steps of n workers, over and over: 1, 2, 4 ... below n.

    After that many steps of averaging alone, n a power of two, all workers have the average of all.
    """
    return [1 << bit for bit in range(max(1, (n - 1).bit_length()))]


class Gossip(ModelAveraging):
    """In step k worker r takes the mean of its parameters and those of worker r - d, where d = 2^(k mod ceil(lg n)).

    Workers send to the one d above. The mean over all workers, which count alike whatever their rows, stays what it is.

    bytes sent  the parameters' in each step; at the end of a period an all-reduce of 40 bytes
    memory      twice the parameters
    source      Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 34
    """

    def __init__(self, replica: ReplicationContext):
        super().__init__(replica)
        transport, length = replica.grid.dp.transport, replica.storage.length
        n, rank = transport.size, transport.rank
        with transport.recorder.called("parameters of a neighbour"):
            self._shifts = [
                Execution(
                    transport,
                    self._average,
                    "add",
                    Plan(
                        (
                            Step(
                                (Transfer((rank + distance) % n, 0, length),),
                                (Transfer((rank - distance) % n, 0, length),),
                            ),
                        )
                    ),
                    transport.claim_tag(),
                    outgoing=self._own,
                )
                for distance in distances(n)
            ]

    def _weight_in_average(self) -> float:
        return 1 / self.replica.grid.dp.size

    def _mix(self, step: int) -> None:
        self._shifts[
            step % len(self._shifts)
        ].run()  # the second buffer holds the neighbour's parameters until then
        self._add(self._own, 0.5, self._average, 0.5, self._own)
