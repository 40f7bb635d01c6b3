"""How much every collective sends: steps, messages and bytes of the published formulas, counted by the transport."""

import numpy as np

from mpitrain.collectives.group import Group, bind, bind_all_to_all, bind_plan
from mpitrain.collectives.plans.steps import chunk_bounds, segments
from tests.laws.collectives import LENGTHS, measured

WIDTH = 4  # bytes of an element


def ceil_lg(n: int) -> int:
    """Smallest k with 2^k >= n."""
    return int(np.ceil(np.log2(n)))


def even(n: int, factor: int = 6) -> int:
    """A length that n ranks and every power of two below divide."""
    return n * 8 * factor


class TrafficLaws:
    """A law is a function of one rank's transport; all ranks run it together."""

    def law_ring(self, transport):
        n, rank = transport.size, transport.rank
        for count in LENGTHS:
            sizes = [stop - start for start, stop in chunk_bounds(count, n)]
            unsent = sizes[rank] + sizes[(rank + 1) % n]
            array = np.ones(count, "float32")
            messages = (n - 1) * segments(n, count)
            assert measured(transport, bind(transport, array).run) == (
                2 * messages,
                WIDTH * (2 * count - unsent),
            )
            half = Group(transport, "ring").bind_reduce_scatter(array)
            assert measured(transport, half.run) == (messages, WIDTH * (count - sizes[rank]))
            half = Group(transport, "ring").bind_all_gather(array)
            assert measured(transport, half.run) == (
                messages,
                WIDTH * (count - sizes[(rank + 1) % n]),
            )
        nbytes = WIDTH * even(n)
        assert (
            measured(transport, bind(transport, np.ones(even(n), "float32")).run)[1]
            == 2 * nbytes * (n - 1) // n
        )

    def law_halving_doubling(self, transport):
        n, rank = transport.size, transport.rank
        lg = n.bit_length() - 1
        power, folded = 1 << lg, n - (1 << lg)
        for array in (np.ones(even(n), "float32"), np.ones(even(n, 600), "float32")):
            nbytes, each = array.nbytes, segments(n, array.size)
            sent = measured(transport, bind(transport, array, algorithm="halving-doubling").run)
            if rank < 2 * folded and rank % 2 == 0:
                assert sent == (each, nbytes)
            elif rank < 2 * folded:
                assert sent == (each * (2 * lg + 1), 2 * nbytes * (power - 1) // power + nbytes)
            else:
                assert sent == (each * 2 * lg, 2 * nbytes * (power - 1) // power)

    def law_recursive_doubling(self, transport):
        n, rank = transport.size, transport.rank
        lg = n.bit_length() - 1
        folded = n - (1 << lg)
        for count in LENGTHS:
            sent = measured(
                transport,
                bind(transport, np.ones(count, "float32"), algorithm="recursive-doubling").run,
            )
            messages = lg if rank >= 2 * folded else lg + 1 if rank % 2 else 1
            assert sent == (messages, messages * WIDTH * count)

    def law_tree(self, transport):
        for count in LENGTHS:
            messages, nbytes = measured(
                transport, bind(transport, np.ones(count, "float32"), algorithm="tree").run
            )
            assert nbytes == messages * WIDTH * count
            assert max(transport.gather_text(messages)) == ceil_lg(transport.size)

    def law_star(self, transport):
        for count in LENGTHS:
            copies = transport.size - 1 if transport.rank == 0 else 1
            sent = measured(
                transport, bind(transport, np.ones(count, "float32"), algorithm="star").run
            )
            assert sent == (copies, copies * WIDTH * count)

    def law_all_ranks_together_send_twice_the_array_per_rank_but_one(self, transport):
        for algorithm in ("ring", "halving-doubling", "tree", "star"):
            for count in LENGTHS:
                _, nbytes = measured(
                    transport, bind(transport, np.ones(count, "float32"), algorithm=algorithm).run
                )
                assert sum(transport.gather_text(nbytes)) == 2 * WIDTH * count * (
                    transport.size - 1
                ), algorithm

    def law_pairwise(self, transport):
        n, nbytes = transport.size, WIDTH * even(transport.size)
        array = np.ones(even(n), "float32")
        for reduction in (
            Group(transport, "pairwise").bind_reduce_scatter(array),
            Group(transport, "pairwise").bind_all_gather(array),
            bind_all_to_all(transport, array, array.copy()),
            bind_all_to_all(transport, array, array.copy(), algorithm="at-once"),
        ):
            assert measured(transport, reduction.run) == (n - 1, nbytes * (n - 1) // n)
        shift = Group(transport).bind_shift(array, array.copy())
        assert measured(transport, shift.run) == ((1, nbytes) if n > 1 else (0, 0))

    def law_bruck(self, transport):
        n, array = transport.size, np.ones(even(transport.size), "float32")
        group = Group(transport, "bruck")
        for reduction in (group.bind_reduce_scatter(array), group.bind_all_gather(array)):
            messages, nbytes = measured(transport, reduction.run)
            assert ceil_lg(n) <= messages <= 2 * ceil_lg(n)
            assert nbytes == array.nbytes * (n - 1) // n

    def law_broadcast_and_reduce(self, transport):
        n, nbytes = transport.size, WIDTH * even(transport.size)
        array = np.ones(even(n), "float32")
        for root in range(n):
            sent = measured(transport, Group(transport).bind_broadcast(array, root).run)
            assert sent[1] == sent[0] * nbytes
            messages = [messages for messages, _ in transport.gather_text(sent)]
            assert sum(messages) == n - 1
            assert messages[root] == max(messages) == ceil_lg(n)
            sent = measured(transport, Group(transport).bind_reduce(array, root=root).run)
            assert sent == ((0, 0) if transport.rank == root else (1, nbytes))
            sent = measured(
                transport, bind_plan(transport, "broadcast", "scatter-ring", array, root=root).run
            )
            assert transport.gather_text(sent)[root][1] == 2 * nbytes * (n - 1) // n
            sent = measured(
                transport, bind_plan(transport, "reduce", "ring-gather", array, root=root).run
            )
            assert sent[1] <= 2 * nbytes * (n - 1) // n

    def law_shared_sends_no_bytes(self, transport):
        for count, barriers in ((10, 1), (1000, 2)):
            reduction = bind(transport, np.ones(count), algorithm="shared")
            assert measured(transport, reduction.run) == (0, 0)
            messages = barriers * ceil_lg(transport.size)  # empty ones
            assert measured(transport, lambda r=reduction: (r.start(), r.wait())) == (messages, 0)
            for half in (
                Group(transport, "shared").bind_reduce_scatter(np.ones(count)),
                Group(transport, "shared").bind_all_gather(np.ones(count)),
            ):
                assert measured(transport, half.run) == (0, 0)
                assert measured(transport, lambda r=half: (r.start(), r.wait())) == (messages, 0)

    def law_native_sends_nothing_by_hand(self, transport):
        assert measured(transport, bind(transport, np.ones(10), algorithm="native").run) == (0, 0)
