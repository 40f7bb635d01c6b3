"""Gossip: after each step every worker averages its parameters with one neighbour, in turn."""

from mpitrain.collectives.engine.executor import Execution
from mpitrain.collectives.plans.steps import Plan, Step, Transfer
from mpitrain.parallel.averaging.base import AveragedParameters, averaging
from mpitrain.parallel.replication.protocol import Replication, ReplicationContext
from mpitrain.parallel.replication.state import StateBuffer


def distances(n: int) -> list[int]:
    """Return the distances to the neighbours of successive steps, repeated in turn: 1, 2, 4 ...
    below n.

    If n is a power of two, len(distances) averages without updates give all n workers the global
    average.
    """
    return [1 << bit for bit in range(max(1, (n - 1).bit_length()))]


class NeighbourAverage:
    """Gossip averaging over an exponential graph: worker r averages with worker r - d in each step.

    In step k the distance d is 2^(k mod ceil(lg n)); worker r sends to worker r + d. All workers
    have equal weight, whatever their rows, so an average leaves the mean over all workers
    unchanged.

    bytes sent  the parameters' bytes in each step; at the end of a period an all-reduce of 48 bytes
    memory      twice the parameters
    source      Ying et al. 2021, Exponential Graph is Provably Efficient for Decentralized Deep
                Training, NeurIPS 34
    """

    def __init__(self, replica: ReplicationContext, store: AveragedParameters):
        """Bind the messages of each distance; collective."""
        self._store = store
        transport, length = replica.grid.dp.transport, replica.storage.length
        n, rank = transport.size, transport.rank
        with transport.recorder.called("parameters of a neighbour"):
            self._shifts = [
                Execution(
                    transport,
                    store.average,
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
                    outgoing=store.own,
                )
                for distance in distances(n)
            ]

    def mix(self, step: int, is_end_of_period: bool) -> None:
        # The second buffer receives the neighbour's parameters.
        self._shifts[step % len(self._shifts)].run()
        own = self._store.own
        self._store.add(own, 0.5, self._store.average, 0.5, own)

    def state(self) -> list[StateBuffer]:
        return []


def gossip(replica: ReplicationContext) -> Replication:
    """Return gossip averaging; collective."""
    return averaging(replica, NeighbourAverage, 1 / replica.grid.dp.size)
