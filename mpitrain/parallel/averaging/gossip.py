"""Gossip: after each step every worker averages its parameters with one neighbour, in turn."""

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.parallel.averaging.base import ModelAveraging
from mpitrain.parallel.replication.protocol import ReplicationContext


def distances(n: int) -> list[int]:
    """Return the distances to the neighbours of successive steps, repeated in turn: 1, 2, 4 ...
    below n.

    If n is a power of two, len(distances) averages without updates give all n workers the global
    average.
    """
    return [1 << bit for bit in range(max(1, (n - 1).bit_length()))]


class Gossip(ModelAveraging):
    """Gossip averaging over an exponential graph: worker r averages with worker r - d in each step.

    In step k the distance d is 2^(k mod ceil(lg n)); worker r sends to worker r + d. All workers
    have equal weight, whatever their rows, so an average leaves the mean over all workers
    unchanged.

    bytes sent  the parameters' bytes in each step; at the end of a period an all-reduce of 40 bytes
    memory      twice the parameters
    source      Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep
                Training, NeurIPS 34
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
        # The second buffer receives the neighbour's parameters.
        self._shifts[step % len(self._shifts)].run()
        self._add(self._own, 0.5, self._average, 0.5, self._own)
