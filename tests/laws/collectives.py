"""What every collective must do, over any transport: values, traffic, agreement, repetition."""

from functools import partial
from itertools import product

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from mpitrain.collectives.engine.executor import OPS
from mpitrain.collectives.group import (
    Group,
    bind,
    bind_all_to_all,
    bind_plan,
    memory_of,
    topology_of,
)
from mpitrain.collectives.group import chosen as chosen_by_auto
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.collectives.routes import ROUTES, route_bytes
from mpitrain.collectives.selection import table as algorithm_table
from mpitrain.collectives.selection.table import choices
from mpitrain.collectives.selection.tuning import DEFAULT
from mpitrain.errors import ConfigError
from tests.laws.transport import coded, raises_comm_error

LENGTHS = (0, 1, 2, 3, 5, 7, 64, 1001)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32")
LONG = 65_539  # float64: above every eager limit; a prime
REDUCERS = {"add": lambda stack: stack.sum(axis=0), "maximum": lambda stack: stack.max(axis=0)}


def everyone(size: int, count: int, dtype="float64") -> np.ndarray:
    """(size, count): what the ranks bring."""
    return np.stack([coded(rank, count, dtype) for rank in range(size)])


def small(rank: int, count: int, dtype="float64") -> np.ndarray:
    """As `coded`, with whole numbers whose sum over 8 ranks every type holds exactly, bfloat16 (up to 256) included."""
    return (rank + 1 + np.arange(count) % 13).astype(dtype)


def marked(source: int, to: int, count: int, dtype="float64") -> np.ndarray:
    """(count, 3): rows that one rank sends to another, by both and their position; exact in every dtype."""
    return ((31 * source + 17 * to + np.arange(3 * count)) % 251).astype(dtype).reshape(-1, 3)


def measured(transport, call) -> tuple[int, int]:
    """Messages and bytes this rank sends in the call."""
    messages, nbytes = transport.traffic.messages, transport.traffic.nbytes
    call()
    return transport.traffic.messages - messages, transport.traffic.nbytes - nbytes


def chosen(transport, array, operation="allreduce"):
    """The algorithm that "auto" chooses for an array; collective."""
    memory = memory_of(transport, array)
    topology = topology_of(transport, array)
    return chosen_by_auto(DEFAULT, topology, array.size, array.itemsize, memory, operation)


class CollectiveLaws:
    """A law is a function of one rank's transport; all ranks run it together."""

    algorithms = choices("allreduce")

    def law_all_reduce_is_exact_on_every_rank(self, transport):
        """Every length meets two types, and every type three lengths and either op."""
        for algorithm in self.algorithms:
            for (j, count), i in product(enumerate(LENGTHS), range(2)):
                dtype = DTYPES[(j + 2 * i) % len(DTYPES)]
                if algorithm == "native" and dtype not in transport.native_dtypes:
                    continue  # refused: a law of its own
                op = ("add", "maximum")[(i + j) % 2]
                mine = small(transport.rank, count, dtype)
                bind(transport, mine, op, algorithm).run()
                right = REDUCERS[op](
                    np.stack([small(rank, count) for rank in range(transport.size)])
                )
                assert np.array_equal(mine.astype("float64"), right), (algorithm, op, dtype, count)

    def law_a_bfloat16_sum_rounds_once_per_addition_alike_on_all_ranks(self, transport):
        """The error is at most n - 1 half-ulps of the largest partial sum: an ulp is at most 2^-7 of a number."""
        n, count = transport.size, 1001
        brought = np.stack(
            [np.random.default_rng(rank).standard_normal(count) for rank in range(n)]
        ).astype("bfloat16")
        truth, largest = (
            array.astype("float64").sum(axis=0) for array in (brought, np.abs(brought))
        )
        for algorithm in self.algorithms:
            if algorithm == "native":
                continue  # MPI has no bfloat16
            mine = brought[transport.rank].copy()
            bind(transport, mine, algorithm=algorithm).run()
            error = np.abs(mine.astype("float64") - truth)
            assert (error <= (n - 1) * 2**-8 * 1.01 * largest).all(), (algorithm, error.max())
            assert len({*transport.gather_text(mine.tobytes().hex())}) == 1, algorithm

    def law_what_is_not_finite_is_summed_without_a_word(self, transport):
        """An overflow of half precision is no error here: who asked for the sum sees it there."""
        mine = np.array([(np.inf, -np.inf)[transport.rank % 2], np.nan, 6e4, 1], "float16")
        for algorithm, dtype in product(self.algorithms, ("float16", "float32")):
            if algorithm == "native":
                continue  # MPI's own
            array = mine.astype(dtype)
            with np.errstate(all="raise"):
                bind(transport, array, algorithm=algorithm).run()
            assert (
                np.isfinite(array[0]) == 0 and np.isnan(array[1]) and array[3] == transport.size
            ), (algorithm, dtype)
            assert np.isinf(array[2]) == (dtype == "float16" and transport.size > 1), (
                algorithm,
                dtype,
            )

    def law_a_long_message_is_reduced_exactly(self, transport):
        for algorithm in self.algorithms:
            mine = coded(transport.rank, LONG)
            bind(transport, mine, algorithm=algorithm).run()
            assert np.array_equal(mine, everyone(transport.size, LONG).sum(axis=0)), algorithm

    def law_any_shape_is_reduced_in_place(self, transport):
        for algorithm in self.algorithms:
            mine = coded(transport.rank, 24).reshape(2, 3, 4)
            Group(transport, algorithm).all_reduce(mine)
            assert np.array_equal(mine, everyone(transport.size, 24).sum(axis=0).reshape(2, 3, 4))

    def law_reduce_scatter_leaves_chunk_r_on_rank_r(self, transport):
        for algorithm in choices("reduce-scatter"):
            for op, truth in REDUCERS.items():
                for count in (*LENGTHS, LONG):
                    mine = coded(transport.rank, count)
                    Group(transport, algorithm).bind_reduce_scatter(mine, op).run()
                    start, stop = chunk_bounds(count, transport.size)[transport.rank]
                    right = truth(everyone(transport.size, count))
                    assert np.array_equal(mine[start:stop], right[start:stop]), (
                        algorithm,
                        op,
                        count,
                    )

    def law_all_gather_brings_chunk_r_from_rank_r(self, transport):
        for algorithm in choices("all-gather"):
            for count in (*LENGTHS, LONG):
                bounds = chunk_bounds(count, transport.size)
                mine = np.full(count, np.nan)
                start, stop = bounds[transport.rank]
                mine[start:stop] = coded(transport.rank, stop - start)
                Group(transport, algorithm).bind_all_gather(mine).run()
                right = [coded(rank, stop - start) for rank, (start, stop) in enumerate(bounds)]
                assert np.array_equal(mine, np.concatenate(right)), (algorithm, count)

    def law_halves_run_after_each_other_are_the_all_reduce_bit_by_bit(self, transport):
        for algorithm in ("ring", "shared"):
            for op in REDUCERS:
                for count in (*LENGTHS, LONG):
                    for halves in (np.empty(count), transport.allocate(count, "float64")):
                        whole = np.random.default_rng(transport.rank).standard_normal(count)
                        whole[count // 3 : count // 3 + 1] = (np.nan, np.inf, -0.0)[
                            transport.rank % 3
                        ]
                        halves[:] = whole
                        bind(transport, whole, op, algorithm).run()
                        scatter = Group(transport, algorithm).bind_reduce_scatter(halves, op)
                        scatter.run()
                        Group(transport, algorithm).bind_all_gather(halves).run()
                        assert halves.tobytes() == whole.tobytes(), (algorithm, op, count)
                        assert scatter.algorithm == algorithm or transport.size == 1

    def law_halves_are_polled_in_any_order_run_after_run(self, transport):
        n, counts = transport.size, (3, 1001, LONG)
        for algorithm in choices("all-gather"):
            arrays = [
                transport.allocate(count, "float64") if count == LONG else np.empty(count)
                for count in counts
            ]
            for operation in ("reduce_scatter", "all_gather"):
                bound = [
                    getattr(Group(transport, algorithm), f"bind_{operation}")(array)
                    for array in arrays
                ]
                for repetition in range(
                    3
                ):  # no barrier between: a fast rank is already in the next run
                    for array in arrays:
                        array[:] = coded(transport.rank + repetition, array.size)
                    for reduction in bound:
                        reduction.start()
                    open_ones = bound[::-1] if transport.rank % 2 else bound[:]
                    while open_ones:
                        open_ones = [reduction for reduction in open_ones if not reduction.poll()]
                    for array in arrays:
                        bounds, stack = (
                            chunk_bounds(array.size, n),
                            [coded(rank + repetition, array.size) for rank in range(n)],
                        )
                        mine = slice(*bounds[transport.rank])
                        if operation == "reduce_scatter":
                            assert np.array_equal(array[mine], sum(stack)[mine]), algorithm
                        else:
                            right = [
                                stack[rank][slice(*chunk)] for rank, chunk in enumerate(bounds)
                            ]
                            assert np.array_equal(array, np.concatenate(right)), algorithm

    def law_a_group_s_halves_are_by_its_algorithm_or_what_auto_chooses(self, transport):
        array = transport.allocate(1001, "float64")
        for algorithm in self.algorithms:
            group = Group(transport, algorithm)
            for operation, reduction in (
                ("reduce-scatter", group.bind_reduce_scatter(array)),
                ("all-gather", group.bind_all_gather(array)),
            ):
                wanted = algorithm if algorithm in algorithm_table.TABLES[operation] else "auto"
                by_auto = chosen(transport, array, operation)
                named = by_auto if wanted == "auto" else wanted
                assert reduction.algorithm == named or transport.size == 1, (algorithm, operation)

    def law_a_group_reduces_by_what_auto_chooses_where_no_algorithm_is_named(self, transport):
        group = Group(transport)
        for count in (3, 1001, LONG):
            array = transport.allocate(count, "float64")
            assert group.bind(array).algorithm == chosen(transport, array) or transport.size == 1, (
                count
            )

    def law_broadcast_reaches_all_from_any_root(self, transport):
        for algorithm in choices("broadcast"):
            for root in range(transport.size):
                for count in (*LENGTHS, LONG):
                    mine = coded(transport.rank, count)
                    bind_plan(transport, "broadcast", algorithm, mine, root=root).run()
                    assert np.array_equal(mine, coded(root, count)), (algorithm, root, count)

    def law_reduce_ends_at_any_root(self, transport):
        for algorithm in choices("reduce"):
            for op, truth in REDUCERS.items():
                for root in range(transport.size):
                    for count in (*LENGTHS, LONG):
                        mine = coded(transport.rank, count)
                        bind_plan(transport, "reduce", algorithm, mine, op=op, root=root).run()
                        if transport.rank == root:
                            assert np.array_equal(mine, truth(everyone(transport.size, count))), (
                                algorithm,
                                op,
                                root,
                            )

    def law_all_to_all_transposes_chunks(self, transport):
        n, rank = transport.size, transport.rank
        for algorithm in choices("all-to-all"):
            for length in (*LENGTHS, LONG // 8):
                incoming = np.full(n * length, np.nan)
                outgoing = coded(rank, n * length)
                bind_all_to_all(transport, outgoing, incoming, algorithm).run()
                right = [
                    coded(peer, n * length)[rank * length : (rank + 1) * length]
                    for peer in range(n)
                ]
                assert np.array_equal(incoming, np.concatenate(right)), (algorithm, length)
                assert np.array_equal(outgoing, coded(rank, n * length))

    def law_an_all_to_all_of_unequal_counts_brings_every_row_and_takes_it_back(self, transport):
        """Bytes are those of the formula, for equal counts, none, all to one rank, primes, and a huge skew."""
        n, rank = transport.size, transport.rank
        skewed = 1 + 40_000 * (np.arange(n * n).reshape(n, n) == n - 1)
        cases = {
            "equal": np.full((n, n), 3),
            "none": np.zeros((n, n), int),
            "all to one": np.outer(np.arange(n) + 5, np.arange(n) == n - 1),
            "primes": np.array([2, 0, 7, 13, 1, 31, 11])[
                np.add.outer(np.arange(n), 2 * np.arange(n)) % 7
            ],
            "skewed": skewed,
        }
        for algorithm, (number, (case, counts)) in product(ROUTES, enumerate(cases.items())):
            dtype = DTYPES[number]
            group, mine = Group(transport, algorithm), counts[rank]
            rows = np.concatenate([marked(rank, to, counts[rank, to], dtype) for to in range(n)])
            right = np.concatenate([marked(p, rank, counts[p, rank], dtype) for p in range(n)])
            routes = group.routes(np.stack([mine - mine // 2, mine // 2], axis=1))
            assert np.array_equal(routes.counts.sum(axis=2), counts)
            there, back = np.zeros_like(right), np.zeros_like(rows)
            ways = routes.bind(rows, there), routes.bind(there, back, is_return=True)
            chosen, row_bytes = ways[0].algorithm, rows.itemsize * 3
            for way, moved in zip(ways, (counts, counts.T), strict=True):
                sent = measured(transport, way.run)[1]
                assert sent == route_bytes(rank, transport.hosts, moved, row_bytes, chosen), case
            assert np.array_equal(there, right) and np.array_equal(back, rows), (algorithm, case)
            received, numbers = group.all_to_all(rows, mine)
            assert np.array_equal(received, right), (algorithm, case)
            assert np.array_equal(numbers, counts[:, rank])

    def law_all_to_alls_of_unequal_counts_may_be_under_way_together(self, transport):
        n, rank = transport.size, transport.rank
        group, counts = Group(transport), np.add.outer(np.arange(n), np.arange(n)) % 3 * 500
        routes, bound = group.routes(counts[rank][:, None]), []
        for number in range(3):
            rows = np.concatenate([marked(rank + number, to, counts[rank, to]) for to in range(n)])
            bound.append((routes.bind(rows, there := np.zeros((routes.received, 3))), rows, there))
        for way, _, _ in bound:
            way.start()
        open_ones = [way for way, _, _ in bound][:: -1 if rank % 2 else 1]
        while open_ones:
            open_ones = [way for way in open_ones if not way.poll()]
        for number, (_, _, there) in enumerate(bound):
            right = [marked(p + number, rank, counts[p, rank]) for p in range(n)]
            assert np.array_equal(there, np.concatenate(right))

    def law_counts_that_do_not_fit_their_rows_are_refused_on_every_rank(self, transport):
        n, group = transport.size, Group(transport)
        is_last = transport.rank == n - 1
        for wrong in ([1] * (n + 1), [2] + [1] * (n - 1), [-1] + [2] * (n - 1)):
            counts = wrong if is_last else [1] * n
            text = raises_comm_error(lambda c=counts: group.all_to_all(np.ones((n, 3)), c))
            assert f"rank {n - 1} passed counts" in text, text
        if n > 1:
            rows = np.ones((n, 4 if is_last else 3))
            assert "needs one width" in raises_comm_error(lambda: group.all_to_all(rows, [1] * n))

    def law_every_operation_moves_every_dtype(self, transport):
        n, rank, count = transport.size, transport.rank, 1001
        bounds, root = chunk_bounds(count, n), n - 1
        own, kept = slice(*bounds[rank]), slice(None if rank == root else 0)
        stack = np.stack([small(peer, count) for peer in range(n)])
        total, gathered = (
            stack.sum(axis=0),
            np.concatenate([stack[peer, slice(*bounds[peer])] for peer in range(n)]),
        )
        for dtype in DTYPES:
            for operation, part, right, settings in (
                ("reduce-scatter", own, total, {}),
                ("reduce", kept, total, {"op": "add", "root": root}),
                ("all-gather", slice(None), gathered, {}),
                ("broadcast", slice(None), stack[root], {"root": root}),
            ):
                for name in choices(operation):
                    mine = small(rank, count, dtype)
                    if settings:
                        bind_plan(transport, operation, name, mine, **settings).run()
                    else:
                        halves = Group(transport, name)
                        getattr(halves, f"bind_{operation.replace('-', '_')}")(mine).run()
                    assert np.array_equal(mine[part].astype("float64"), right[part]), (
                        operation,
                        name,
                        dtype,
                    )
            for distance in range(1, n + 1):
                incoming, way = np.zeros(count, dtype), (distance,) if distance > 1 else ()
                Group(transport).bind_shift(small(rank, count, dtype), incoming, *way).run()
                truth = stack[(rank - distance) % n]
                assert np.array_equal(incoming.astype("float64"), truth), (distance, dtype)
            for name in choices("all-to-all"):
                incoming = np.zeros(5 * n, dtype)
                bind_all_to_all(transport, small(rank, 5 * n, dtype), incoming, name).run()
                right = np.concatenate(
                    [small(peer, 5 * n)[5 * rank : 5 * rank + 5] for peer in range(n)]
                )
                assert np.array_equal(incoming.astype("float64"), right), (name, dtype)

    def law_no_operation_takes_arrays_with_gaps(self, transport):
        gaps = np.ones(4 * transport.size)[::2]
        group = Group(transport)
        for bind_to in (
            group.bind_reduce_scatter,
            group.bind_all_gather,
            group.bind_broadcast,
            group.bind_reduce,
            partial(bind_plan, transport, "sendrecv", "ping-pong"),
        ):
            assert "an array with gaps" in raises_comm_error(lambda bind_to=bind_to: bind_to(gaps))
        assert "an array with gaps" in raises_comm_error(
            lambda: bind_all_to_all(transport, gaps, gaps.copy())
        )
        assert "an array with gaps" in raises_comm_error(
            lambda: bind_all_to_all(transport, gaps.copy(), gaps)
        )

    def law_all_to_all_refuses_arrays_that_do_not_divide_or_differ(self, transport):
        n = transport.size
        if n > 1:
            text = raises_comm_error(
                lambda: bind_all_to_all(transport, np.ones(n + 1), np.ones(n + 1))
            )
            assert f"both to {2 * n}" in text
        text = raises_comm_error(
            lambda: bind_all_to_all(transport, np.ones(n), np.ones(n, "float32"))
        )
        assert "needs two arrays alike" in text

    def law_ping_pong_comes_back_unchanged(self, transport):
        for count in (*LENGTHS, LONG):
            mine = coded(transport.rank, count)
            reduction = bind_plan(transport, "sendrecv", "ping-pong", mine)
            messages = 1 if transport.size > 1 and transport.rank in (0, transport.size - 1) else 0
            assert measured(transport, reduction.run) == (messages, messages * mine.nbytes)
            last = transport.size > 1 and transport.rank == transport.size - 1
            assert np.array_equal(mine, coded(0 if last else transport.rank, count))

    def law_buffers_in_a_window_are_reduced_where_they_lie(self, transport):
        whole = transport.allocate(2001, "float64")
        for start, stop in ((0, 2001), (3, 1990), (8, 8)):
            part = whole[start:stop]
            before = len(transport.windows)
            reduction = bind(transport, part, algorithm="shared")
            for op in range(2):
                transport.barrier()
                part[:] = coded(transport.rank + op, part.size)
                reduction.run() if op else (reduction.start(), reduction.wait())
                right = sum(coded(rank + op, part.size) for rank in range(transport.size))
                assert np.array_equal(part, right)
            Group(transport, "shared").bind_reduce_scatter(part).run()
            Group(transport, "shared").bind_all_gather(part).run()
            if transport.size > 1 and part.size:
                assert len(transport.windows) == before, "a staging window was allocated"

    def law_small_arrays_take_turns_in_their_copies(self, transport):
        mine = np.empty(7)
        for op, truth in REDUCERS.items():
            reduction = bind(transport, mine, op, "shared")
            for run in range(5):  # no barrier between: a fast rank is already in the next run
                mine[:] = coded(transport.rank + run, 7)
                reduction.run() if run % 2 else (reduction.start(), reduction.wait())
                assert np.array_equal(
                    mine, truth(np.stack([coded(rank + run, 7) for rank in range(transport.size)]))
                )

    def law_arrays_outside_windows_borrow_one_and_return_it(self, transport):
        for _ in range(3):
            mine = coded(transport.rank, 2001)
            bind(transport, mine, algorithm="shared").run()
            assert np.array_equal(mine, everyone(transport.size, 2001).sum(axis=0))
        before = len(transport.windows)
        held = [bind(transport, coded(transport.rank, 2001), algorithm="shared") for _ in range(2)]
        added = len(transport.windows) - before
        assert added == (transport.size > 1), "one was idle, one had to be made"
        del held

    def law_parts_of_a_transport_use_its_windows(self, transport):
        whole = transport.allocate(2001, "float64")
        whole[:] = coded(transport.rank, 2001)
        part = transport.split(transport.rank % 2)
        before = len(transport.windows)
        bind(part, whole, algorithm="shared").run()
        assert len(transport.windows) == before or part.size == 1
        assert np.array_equal(
            whole, sum(coded(rank, 2001) for rank in range(transport.rank % 2, transport.size, 2))
        )

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
        for algorithm in self.algorithms:
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
                    truth = sum(
                        coded(rank + repetition, array.size) for rank in range(transport.size)
                    )
                    assert np.array_equal(array, truth), algorithm

    def law_a_second_start_is_refused(self, transport):
        if transport.size == 1:
            return  # a run of one rank has ended when it has started
        last, word = transport.size - 1, np.zeros(1)
        for algorithm in self.algorithms:
            reduction = Group(transport, algorithm).bind(np.ones(4))
            if transport.rank == last:
                reduction.start()  # it cannot end: nobody else has begun
                assert "started again" in raises_comm_error(reduction.start), algorithm
                assert "started again" in raises_comm_error(reduction.run), algorithm
                for peer in range(last):
                    transport.send(
                        word, peer, tag=99
                    )  # a barrier would be one of MPI's collectives, as `native` is
            else:
                transport.recv(word, last, tag=99)
                reduction.start()
            reduction.wait()
            reduction.run()

    def law_ranks_that_differ_are_refused_on_every_rank(self, transport):
        if transport.size == 1:
            return  # nobody to differ from
        last = transport.rank == transport.size - 1
        count = transport.size + last
        text = raises_comm_error(lambda: Group(transport).bind(np.ones(count)))
        assert f"rank {transport.rank}: all-reduce needs one count" in text
        assert f"{transport.size} on rank 0" in text
        assert f"{transport.size + 1} on rank {transport.size - 1}" in text
        assert "needs one dtype" in raises_comm_error(
            lambda: Group(transport).bind(np.ones(3, "float32" if last else "float64"))
        )
        assert "needs one algorithm" in raises_comm_error(
            lambda: Group(transport, "star" if last else "ring").bind(np.ones(3))
        )
        assert "needs one op" in raises_comm_error(
            lambda: Group(transport).bind(np.ones(3), "maximum" if last else "add")
        )
        assert "needs one root" in raises_comm_error(
            lambda: Group(transport).bind_broadcast(np.ones(3), int(last))
        )

    def law_strided_input_is_refused_on_every_rank(self, transport):
        first = transport.rank == 0
        array = np.ones((4, 8))[:, :4] if first else np.ones((4, 4))
        text = raises_comm_error(lambda: Group(transport).bind(array))
        assert "but rank 0 passed an array with gaps" in text

    def law_what_is_no_writable_array_of_numbers_is_refused_on_every_rank(self, transport):
        read_only = np.ones(4)
        read_only.flags.writeable = False
        last = transport.size - 1
        for odd, words in (
            ([1.0] * 4, "a list, which is no array"),
            (read_only, "read-only"),
            (np.ones(4, ">f8"), "another order"),
            (np.ones(4, "complex64"), "complex64"),
            (np.ones(4, "datetime64[s]"), "datetime64"),
            (np.array(["a"] * 4), "<U1"),
            (np.ones(4, "longdouble"), "elements of type"),
        ):
            array = odd if transport.rank == last else np.ones(4)
            text = raises_comm_error(lambda array=array: bind(transport, array))
            assert f"but rank {last} passed" in text and words in text, (odd, text)

    def law_all_to_all_refuses_arrays_that_overlap_on_one_rank_on_every_rank(self, transport):
        array = np.ones(transport.size)
        other = array if transport.rank == transport.size - 1 else array.copy()
        assert "overlap on no rank" in raises_comm_error(
            lambda: bind_all_to_all(transport, array, other)
        )

    def law_a_root_is_a_rank(self, transport):
        for root in (-1, transport.size, 0.0):
            assert f"root {root}" in raises_comm_error(
                lambda root=root: Group(transport).bind_broadcast(np.ones(3), root)
            )

    def law_unknown_names_are_refused_with_the_known_ones(self, transport):
        for call, known in (
            (lambda: Group(transport, "rign").bind(np.ones(3)), ", ".join(choices("allreduce"))),
            (lambda: Group(transport).bind(np.ones(3), "mean"), ", ".join(OPS)),
        ):
            try:
                call()
            except ConfigError as error:
                assert known in str(error)
            else:
                raise AssertionError("no ConfigError was raised")

    def law_every_operator_is_the_function_of_numpy(self, transport):
        stack = np.arange(7) % 3 + 1 + np.arange(transport.size)[:, None]
        for algorithm in ("auto", "ring", "native"):
            for op, function in OPS.items():
                array = stack[transport.rank].copy()
                Group(transport, algorithm).all_reduce(array, op)
                assert np.array_equal(array, function.reduce(stack)), (algorithm, op)

    def law_native_refuses_what_mpi_has_no_type_for(self, transport):
        text = raises_comm_error(lambda: Group(transport, "native").bind(np.ones(3, "float16")))
        assert "reduces, which float16" in text
        assert "Use algorithm ring" in text
