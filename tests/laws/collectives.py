"""What every collective must do, over any transport: values, traffic, agreement, repetition."""

import numpy as np

from mpitrain.collectives import bind as binding
from mpitrain.collectives.group import Group
from mpitrain.collectives.plans import chunk_bounds
from mpitrain.errors import ConfigError
from tests.laws.transport import coded, raises_comm_error

LENGTHS = (0, 1, 2, 3, 5, 7, 64, 1001)
LONG = 1 << 16  # float64: above every eager limit
REDUCERS = {"add": lambda stack: stack.sum(axis=0), "maximum": lambda stack: stack.max(axis=0)}


def everyone(size: int, count: int, dtype="float64") -> np.ndarray:
    """(size, count): what the ranks bring."""
    return np.stack([coded(rank, count, dtype) for rank in range(size)])


def measured(transport, call) -> tuple[int, int]:
    """Messages and bytes this rank sends in the call."""
    messages, nbytes = transport.traffic.messages, transport.traffic.nbytes
    call()
    return transport.traffic.messages - messages, transport.traffic.nbytes - nbytes


def ceil_lg(n: int) -> int:
    """Smallest k with 2^k >= n."""
    return int(np.ceil(np.log2(n)))


class CollectiveLaws:
    """A law is a function of one rank's transport; all ranks run it together."""

    def law_all_reduce_is_exact_on_every_rank(self, transport):
        for algorithm in binding.ALGORITHMS:
            for op, truth in REDUCERS.items():
                for dtype in ("float32", "float64", "int32"):
                    for count in LENGTHS:
                        mine = coded(transport.rank, count, dtype)
                        Group(transport, algorithm).all_reduce(mine, op)
                        right = truth(everyone(transport.size, count, dtype))
                        assert np.array_equal(mine, right), (algorithm, op, dtype, count)

    def law_a_long_message_is_reduced_exactly(self, transport):
        for algorithm in binding.ALGORITHMS:
            mine = coded(transport.rank, LONG)
            Group(transport, algorithm).all_reduce(mine)
            assert np.array_equal(mine, everyone(transport.size, LONG).sum(axis=0)), algorithm

    def law_half_precision_is_reduced_too(self, transport):
        for algorithm in sorted(binding.ALL_REDUCE):
            mine = (np.arange(17) % 5 + transport.rank).astype("float16")
            Group(transport, algorithm).all_reduce(mine)
            truth = transport.size * (np.arange(17) % 5) + sum(range(transport.size))
            assert np.array_equal(mine, truth.astype("float16")), algorithm

    def law_any_shape_is_reduced_in_place(self, transport):
        for algorithm in binding.ALGORITHMS:
            mine = coded(transport.rank, 24).reshape(2, 3, 4)
            Group(transport, algorithm).all_reduce(mine)
            assert np.array_equal(mine, everyone(transport.size, 24).sum(axis=0).reshape(2, 3, 4))

    def law_reduce_scatter_leaves_chunk_r_on_rank_r(self, transport):
        group = Group(transport)
        for op, truth in REDUCERS.items():
            for count in (*LENGTHS, LONG):
                mine = coded(transport.rank, count)
                group.reduce_scatter(mine, op)
                start, stop = chunk_bounds(count, transport.size)[transport.rank]
                assert np.array_equal(mine[start:stop], truth(everyone(transport.size, count))[start:stop])

    def law_all_gather_brings_chunk_r_from_rank_r(self, transport):
        for count in (*LENGTHS, LONG):
            bounds = chunk_bounds(count, transport.size)
            mine = np.full(count, np.nan)
            start, stop = bounds[transport.rank]
            mine[start:stop] = coded(transport.rank, stop - start)
            Group(transport).all_gather(mine)
            truth = [coded(rank, stop - start) for rank, (start, stop) in enumerate(bounds)]
            assert np.array_equal(mine, np.concatenate(truth))

    def law_broadcast_reaches_all_from_any_root(self, transport):
        for root in range(transport.size):
            for count in LENGTHS:
                mine = coded(transport.rank, count)
                Group(transport).broadcast(mine, root)
                assert np.array_equal(mine, coded(root, count))

    def law_ring_repeats_bit_by_bit_and_agrees_on_all_ranks(self, transport):
        original = np.random.default_rng(transport.rank).standard_normal(1001).astype("float32")
        mine = original.copy()
        reduction = Group(transport, "ring").bind(mine)
        reduction.run()
        first = mine.tobytes()
        for _ in range(3):
            mine[:] = original
            reduction.run()
            assert mine.tobytes() == first
        assert len(set(transport.gather_text(first.hex()))) == 1

    def law_several_reductions_are_polled_in_any_order(self, transport):
        for algorithm in binding.ALGORITHMS:
            group = Group(transport, algorithm)
            arrays = [np.zeros(count) for count in (3, 1001, LONG)]
            reductions = [group.bind(array) for array in arrays]
            for repetition in range(3):
                for array in arrays:
                    array[:] = coded(transport.rank + repetition, array.size)
                for reduction in reductions:
                    reduction.start()
                open_ones = reductions[::-1] if transport.rank % 2 else reductions[:]
                while open_ones:
                    open_ones = [reduction for reduction in open_ones if not reduction.poll()]
                for reduction in reductions:
                    reduction.wait()
                for array in arrays:
                    truth = sum(coded(rank + repetition, array.size) for rank in range(transport.size))
                    assert np.array_equal(array, truth), algorithm

    def law_a_second_start_is_refused(self, transport):
        if transport.size == 1:
            return  # a run of one rank has ended when it has started
        reduction = Group(transport, "ring").bind(np.ones(4))
        reduction.start()
        assert "started again" in raises_comm_error(reduction.start)
        reduction.wait()

    def law_ring_traffic_is_the_formula(self, transport):
        n, rank = transport.size, transport.rank
        for count in LENGTHS:
            sizes = [stop - start for start, stop in chunk_bounds(count, n)]
            reduction = Group(transport, "ring").bind(np.ones(count, "float32"))
            unsent = sizes[rank] + sizes[(rank + 1) % n]
            assert measured(transport, reduction.run) == (2 * (n - 1), 4 * (2 * count - unsent))
            if count % n == 0:
                assert 4 * (2 * count - unsent) == 2 * 4 * count * (n - 1) // n
            half = Group(transport).bind_reduce_scatter(np.ones(count, "float32"))
            assert measured(transport, half.run) == (n - 1, 4 * (count - sizes[rank]))
            half = Group(transport).bind_all_gather(np.ones(count, "float32"))
            assert measured(transport, half.run) == (n - 1, 4 * (count - sizes[(rank + 1) % n]))

    def law_star_traffic_is_the_formula(self, transport):
        reduction = Group(transport, "star").bind(np.ones(10))
        copies = transport.size - 1 if transport.rank == 0 else 1
        assert measured(transport, reduction.run) == (copies, 80 * copies)

    def law_broadcast_traffic_is_the_formula(self, transport):
        for root in range(transport.size):
            reduction = Group(transport).bind_broadcast(np.ones(10), root)
            messages, nbytes = measured(transport, reduction.run)
            assert nbytes == 80 * messages
            sent = transport.gather_text(messages)
            assert sum(sent) == transport.size - 1
            assert sent[root] == max(sent) == ceil_lg(transport.size)

    def law_native_sends_nothing_by_hand(self, transport):
        assert measured(transport, Group(transport, "native").bind(np.ones(10)).run) == (0, 0)

    def law_ranks_that_differ_are_refused_on_every_rank(self, transport):
        if transport.size == 1:
            return  # nobody to differ from
        last = transport.rank == transport.size - 1
        count = transport.size + last
        text = raises_comm_error(lambda: Group(transport).bind(np.ones(count)))
        assert f"rank {transport.rank}: all-reduce needs one count on every rank" in text
        assert f"{transport.size} on rank 0" in text
        assert f"{transport.size + 1} on rank {transport.size - 1}" in text
        assert "needs one dtype" in raises_comm_error(
            lambda: Group(transport).bind(np.ones(3, "float32" if last else "float64")))
        assert "needs one algorithm" in raises_comm_error(
            lambda: Group(transport, "star" if last else "ring").bind(np.ones(3)))
        assert "needs one op" in raises_comm_error(
            lambda: Group(transport).bind(np.ones(3), "maximum" if last else "add"))
        assert "needs one root" in raises_comm_error(lambda: Group(transport).bind_broadcast(np.ones(3), int(last)))

    def law_strided_input_is_refused_on_every_rank(self, transport):
        first = transport.rank == 0
        array = np.ones((4, 8))[:, :4] if first else np.ones((4, 4))
        text = raises_comm_error(lambda: Group(transport).bind(array))
        assert "needs contiguous arrays of plain numbers on every rank, but rank 0 passed another kind" in text

    def law_unknown_names_are_refused_with_the_known_ones(self, transport):
        for call, known in (
            (lambda: Group(transport, "rign").bind(np.ones(3)), "ring, star, native"),
            (lambda: Group(transport).bind(np.ones(3), "mean"), "add, maximum"),
        ):
            try:
                call()
            except ConfigError as error:
                assert known in str(error)
            else:
                raise AssertionError("no ConfigError was raised")

    def law_native_refuses_what_mpi_has_no_type_for(self, transport):
        text = raises_comm_error(lambda: Group(transport, "native").bind(np.ones(3, "float16")))
        assert "algorithm native cannot reduce float16" in text
        assert "Use algorithm ring" in text
