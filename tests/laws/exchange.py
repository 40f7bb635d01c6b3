"""What leased activations must do, over any transport: values, addresses, what is bound, counted and given back."""

from functools import wraps

import numpy as np

from mpitrain.collectives.group import Group
from mpitrain.collectives.plans.steps import chunk_bounds
from mpitrain.machine.backend import Arena
from tests.laws.collectives import DTYPES, everyone, small
from tests.laws.transport import coded, raises_comm_error


def over_group(*algorithms):
    """A law about a group by each of these algorithms, over a transport of its own, as one about the transport. Neither the group
    nor arrays of the law's leave a window.
    """

    def about_transports(law):
        @wraps(law)
        def law_of_transport(self, transport):
            for algorithm in algorithms:
                before, part = len(transport.windows), transport.split(0)
                group = Group(part, algorithm, arena=Arena())
                law(self, group)
                assert group.arena.live == 0, algorithm
                part.barrier()  # ranks that are threads hold each other's arrays until all have left the last meeting
                part.close()
                assert len(transport.windows) == before, algorithm

        return law_of_transport

    return about_transports


class Counted:
    """Counts what must stand still after the first step: tags, rounds of text, windows, and buffers of the arena."""

    def __init__(self, group):
        self.calls, self.group = 0, group
        for name in ("claim_tag", "gather_text", "allocate", "split"):
            setattr(group.transport, name, self._counting(getattr(group.transport, name)))

    def _counting(self, function):
        def call(*arguments):
            self.calls += 1
            return function(*arguments)

        return call

    def now(self):
        return self.calls, self.group.arena.allocations, len(self.group.transport.windows)


def layers_forward_and_backward(group, part, rows):
    """Some exchanges as layers make them: several of one shape live together, others end between; returns what was right."""
    n, rank, width, saved, right = group.size, group.rank, 6, [], True
    for layer in range(4):
        y = group.exchange((rows, width), "float64")
        y.array[:] = coded(rank, rows * width).reshape(rows, width) + layer + part
        y.bound_all_reduce().run()
        saved.append(y.array)
        facts = group.exchange((rows,), "float64")
        facts.array[:] = coded((rank + layer) % n, rows)
        facts.bound_all_reduce("maximum").start()
        scattered = group.exchange((rows, width), "float64")
        scattered.array[:] = coded(rank, rows * width).reshape(rows, width)
        scattered.bound_reduce_scatter().start()
        for reduction in (scattered.bound_reduce_scatter(), facts.bound_all_reduce("maximum"))[
            :: (-1) ** rank
        ]:
            reduction.poll()
        facts.bound_all_reduce("maximum").wait()
        scattered.bound_reduce_scatter().wait()
        scattered.bound_all_gather().run()
        right &= np.array_equal(facts.array, coded(n - 1, rows))
        right &= np.array_equal(scattered.array.reshape(-1), everyone(n, rows * width).sum(axis=0))
    while saved:
        right &= np.array_equal(
            saved.pop().reshape(-1), everyone(n, rows * width).sum(axis=0) + n * (len(saved) + part)
        )
    return right


class ExchangeLaws:
    """A law is a function of one rank's transport; all ranks run it together, on one host."""

    @over_group("ring", "shared", "native")
    def law_exchanges_compute_what_collectives_do(self, group):
        n = group.size
        for shape in ((0,), (5,), (n, 11), (2, 3, 400)):
            count = int(np.prod(shape))
            bounds, stack = chunk_bounds(count, n), everyone(n, count)
            for _ in range(2):
                lease = group.exchange(shape, "float64")
                assert lease.array.shape == shape and lease.array.flags.c_contiguous
                assert lease.array.ctypes.data % 64 == 0
                for op, right in (("add", stack.sum(axis=0)), ("maximum", stack.max(axis=0))):
                    lease.array[...] = coded(group.rank, count).reshape(shape)
                    lease.bound_all_reduce(op).run()
                    assert np.array_equal(lease.array.reshape(-1), right), (
                        group.algorithm,
                        op,
                        shape,
                    )
                    lease.array[...] = coded(group.rank, count).reshape(shape)
                    lease.bound_reduce_scatter(op).run()
                    assert np.array_equal(lease.own, right[slice(*bounds[group.rank])]), (
                        group.algorithm,
                        op,
                        shape,
                    )
                lease.array[...] = np.nan
                lease.own[:] = coded(group.rank, lease.own.size)
                lease.bound_all_gather().run()
                right = [coded(rank, stop - start) for rank, (start, stop) in enumerate(bounds)]
                assert np.array_equal(lease.array.reshape(-1), np.concatenate(right)), (
                    group.algorithm,
                    shape,
                )

    @over_group("auto")
    def law_exchanges_carry_every_dtype(self, group):
        for dtype in DTYPES:
            lease = group.exchange((5, 40), dtype)
            assert lease.array.dtype == np.dtype(dtype)
            lease.array[:] = small(group.rank, 200, dtype).reshape(5, 40)
            lease.bound_all_reduce().run()
            right = sum(small(rank, 200) for rank in range(group.size)).reshape(5, 40)
            assert np.array_equal(lease.array.astype("float64"), right), dtype

    @over_group("auto")
    def law_rows_are_gathered_and_scattered_as_they_lie(self, group):
        n, rank = group.size, group.rank
        lease = group.exchange((2, 3 * n, 5), "float64")
        lease.own_rows[:] = np.arange(6)[:, None] + 100 * rank
        lease.bound_all_gather().run()
        right = np.concatenate([np.arange(6) + 100 * peer for peer in range(n)])
        assert np.array_equal(lease.array.reshape(-1, 5), np.repeat(right[:, None], 5, axis=1))
        lease.array[:] = np.arange(6 * n).reshape(2, 3 * n, 1) * (rank + 1)
        lease.bound_reduce_scatter().run()
        right = np.arange(6 * rank, 6 * rank + 6) * n * (n + 1) // 2
        assert lease.own_rows.shape == (6, 5) and np.array_equal(
            lease.own_rows, np.repeat(right[:, None], 5, axis=1)
        )
        if n > 1:
            text = raises_comm_error(lambda: group.exchange((n + 1, 5), "float64").own_rows)
            assert (
                f"{n + 1} rows are to be divided by {n}" in text
                and f"Use {n} or {2 * n} rows" in text
            )
            text = raises_comm_error(lambda: group.exchange((1, 5), "float64").own_rows)
            assert f"Use {n} rows" in text

    @over_group("ring", "shared", "native")
    def law_after_the_first_step_nothing_is_bound_allocated_or_agreed(self, group):
        assert layers_forward_and_backward(group, 0, 7) and layers_forward_and_backward(group, 0, 4)
        counted = Counted(group)
        before, peak = counted.now(), group.arena.peak
        for part in range(3):
            assert layers_forward_and_backward(group, part, 7) and layers_forward_and_backward(
                group, part, 4
            )
        assert counted.now() == before and group.arena.peak == peak and group.arena.live == 0

    @over_group("ring")
    def law_a_buffer_is_found_again_by_count_and_dtype(self, group):
        first = group.exchange((3, 4), "float32")
        place, bound = first.array.ctypes.data, first.bound_all_reduce()
        second = group.exchange((12,), "float32")
        assert second.array.ctypes.data != place and second.bound_all_reduce() is not bound
        view = first.array[1:]
        del first
        assert group.exchange((4, 3), "float32").array.ctypes.data not in (
            place,
            second.array.ctypes.data,
        ), "a view lives"
        del view
        again = group.exchange((2, 6), "float32")
        assert again.array.ctypes.data == place and again.bound_all_reduce() is bound
        assert group.exchange((12,), "int32").array.ctypes.data != place

    @over_group("ring", "shared")
    def law_leases_that_end_in_another_order_on_each_rank_meet_again(self, group):
        for turn in range(4):
            leases = [group.exchange((700,), "float64") for _ in range(3)]
            for i, lease in enumerate(leases):
                lease.array[:] = coded(group.rank, 700) + i + turn
                lease.bound_all_reduce().start()
            under_way = [lease.bound_all_reduce() for lease in leases[:: (-1) ** group.rank]]
            while under_way:
                under_way = [reduction for reduction in under_way if not reduction.poll()]
            for i, lease in enumerate(leases):
                assert np.array_equal(
                    lease.array, everyone(group.size, 700).sum(axis=0) + group.size * (i + turn)
                )
            del lease
            while leases:
                leases.pop((group.rank + turn) % len(leases))

    @over_group("ring", "shared", "native")
    def law_what_is_under_way_when_its_lease_ends_is_waited_for(self, group):
        total = everyone(group.size, 700).sum(axis=0)
        for _ in range(3):
            try:
                lease = group.exchange((700,), "float64")
                lease.array[:] = 1
                lease.bound_all_reduce().start()
                raise KeyError
            except KeyError:
                del lease
            assert group.arena.live == 0
            lease = group.exchange((700,), "float64")
            lease.array[:] = coded(group.rank, 700)
            lease.bound_all_reduce().run()
            assert np.array_equal(lease.array, total)

    @over_group("ring", "shared")
    def law_what_is_under_way_when_a_transport_is_closed_is_waited_for(self, group):
        for _ in range(3):
            group.exchange((700,), "float64").bound_all_reduce().start()
            group.exchange((1,), "float32").bound_all_gather().start()

    @over_group("ring")
    def law_leases_count_as_the_arena_s(self, group):
        arena = group.arena
        plain = arena.take((3,), "float64")
        lease = group.exchange((100,), "float64")
        assert (arena.live, arena.peak, arena.allocations) == (64 + 832, 64 + 832, 2)
        array = lease.array
        del lease, plain
        assert (arena.live, arena.peak) == (832, 896)
        del array
        assert (arena.live, arena.allocations) == (0, 2)

    @over_group("shared")
    def law_one_host_s_exchanges_lie_in_few_windows(self, group):
        before, leases = (
            len(group.transport.windows),
            [group.exchange((2000,), "float64") for _ in range(64)],
        )
        for lease in leases:
            lease.array[:] = coded(group.rank, 2000)
            lease.bound_all_reduce().run()
            assert np.array_equal(lease.array, everyone(group.size, 2000).sum(axis=0))
        windows = len(group.transport.windows) - before
        assert windows == (0 if group.size == 1 else 7), (
            windows
        )  # 1 2 4 ... 64 buffers: none was borrowed
        del leases, lease

    @over_group("ring")
    def law_ranks_that_ask_for_different_activations_are_refused_on_every_rank(self, group):
        if group.size == 1:
            return  # nobody to differ from
        last = group.rank == group.size - 1
        text = raises_comm_error(lambda: group.exchange((5 + last,), "float64"))
        assert "5 on rank 0" in text
        assert "needs one dtype" in raises_comm_error(
            lambda: group.exchange((5,), "float32" if last else "int32")
        )
        assert group.arena.live == group.arena.allocations == 0
        lease = group.exchange((5,), "float64")
        assert "needs one op" in raises_comm_error(
            lambda: lease.bound_all_reduce("maximum" if last else "add")
        )
        lease.array[:] = coded(group.rank, 5)
        lease.bound_all_reduce().run()
        assert np.array_equal(lease.array, everyone(group.size, 5).sum(axis=0))

    def law_an_activation_outlives_its_group(self, transport):
        part = transport.split(0)
        group = Group(part, "shared")
        lease = group.exchange((700,), "float64")
        lease.array[:] = coded(group.rank, 700)
        array = lease.array
        before = len(transport.windows)
        del lease
        part.close()
        assert len(transport.windows) == before and np.array_equal(
            array, coded(transport.rank, 700)
        )
