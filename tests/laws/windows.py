"""What closing transports may take away: windows that nobody uses. A law is given a transport of its own, which it closes."""

import gc

import numpy as np
import pytest

from mpitrain.collectives.group import Group, bind
from mpitrain.config import parse, with_settings
from mpitrain.errors import ConfigError
from mpitrain.run.build import build
from tests.laws.collectives import everyone
from tests.laws.transport import coded, raises_comm_error

TINY = ("model.layers=1", "model.width=8", "model.heads=1", "model.context=4", "run.steps=2")


def is_right(transport, array, reduction) -> bool:
    """Whether a run sums what every rank puts into the array now."""
    array[:] = coded(transport.rank, array.size)
    reduction.run()
    return np.array_equal(array, everyone(transport.size, array.size).sum(axis=0))


def bound(transport, count, algorithm):
    """An array that lies in no window, and its reduction through a borrowed one."""
    array = np.empty(count)
    reduction = bind(transport, array, algorithm=algorithm)
    assert is_right(transport, array, reduction)
    return array, reduction


class WindowLaws:
    """All ranks run a law together, on one host."""

    def law_what_borrowed_a_window_outlives_the_part_that_made_it(self, root):
        for algorithm in ("shared", "auto"):
            for count in (16, 5001):
                first, second = root.split(0), root.split(0)
                bound(first, count, algorithm)
                before = len(root.windows)
                array, reduction = bound(second, count, algorithm)
                assert len(root.windows) == before, "it has borrowed"
                array[:] = coded(root.rank, count)
                reduction.start()
                first.close()
                reduction.wait()
                assert np.array_equal(array, everyone(root.size, count).sum(axis=0))
                assert len(root.windows) == before and is_right(second, array, reduction)
                second.close()
        root.close()
        assert len(root.windows) == 0

    def law_a_trainer_outlives_the_one_before_and_its_transport(self, root):
        config = parse(
            with_settings(
                {}, [*TINY, "replication.algorithm=shared", f"batch.size={2 * root.size}"]
            )
        )
        first, second = root.split(0), root.split(0)
        losses = []
        for transport in (first, second):
            trainer = build(transport, config).trainer
            rows = np.arange(8).reshape(2, 4) + root.rank
            losses.append([trainer.step(0, rows, rows + 1).loss])
        first.close()
        assert trainer.step(1, rows, rows + 1).loss < losses[1][0] == losses[0][0]
        del trainer
        second.close()
        root.close()

    def law_a_closed_job_leaves_nothing_while_others_go_on(self, root):
        halves = root.split(root.rank % 2)
        where = [
            (halves, "replication.zero=1"),
            (root, "model.tied=false"),
            (halves, "model.tied=true"),
        ]

        def job(number):
            transport, setting = where[number]
            config = parse(
                with_settings({}, [*TINY, "run.steps=9", f"batch.size={2 * root.size}", setting])
            )
            return build(transport, config)

        def step(job, index):
            return job.trainer.step(index, *job.trainer.replica.batch(job.data, index)).loss

        alone = []
        for number in range(3):
            one = job(number)
            alone.append([step(one, index) for index in range(4 - number)])
            one.close()
        assert len(root.windows) == 0
        jobs, losses = [job(number) for number in range(3)], [[], [], []]
        for index in range(4):
            for number, one in enumerate(jobs):
                losses[number].append(step(one, index))
            if index:
                jobs.pop().close()
        assert losses == alone and not jobs
        assert len(root.windows) == 0
        halves.close()
        root.close()

    def law_a_job_that_cannot_be_made_has_given_back_what_it_took(self, root):
        settings = [*TINY, f"batch.size={2 * root.size}", 'pipeline.partition="1"']
        with pytest.raises(ConfigError) as kept:
            build(root, parse(with_settings({}, settings)))
        root.close()
        assert "add up to" in str(kept.value) and len(root.windows) == 0

    def law_a_transport_refuses_to_close_under_a_job_alive_on_one_rank(self, root):
        left = (
            build(root, parse(with_settings({}, [*TINY, f"batch.size={2 * root.size}"])))
            if root.size > 1
            else None
        )
        if root.rank:
            left = None
            gc.collect()
        if left or root.rank:
            assert "but rank 0 has " in raises_comm_error(root.close)
        left = None
        gc.collect()
        root.close()
        assert len(root.windows) == 0

    def law_an_array_lives_on_when_the_part_that_allocated_it_is_closed(self, root):
        first, second = root.split(0), root.split(0)
        view = first.allocate(5001, "float64")[1:]
        reduction = bind(second, view, algorithm="shared")
        view[:] = coded(root.rank, 5000)
        first.close()
        assert np.array_equal(view, coded(root.rank, 5000)) and is_right(second, view, reduction)
        second.close()
        root.close()

    def law_a_part_takes_the_windows_that_nobody_uses_with_it(self, root):
        part = root.split(0)
        bound(part, 5001, "shared")
        part.allocate(100, "float64")
        assert len(root.windows) == (2 if root.size > 1 else 0)
        part.close()
        assert len(root.windows) == 0
        root.close()

    def law_a_window_that_one_rank_uses_stays_on_all(self, root):
        part = root.split(0)
        array = part.allocate(100, "float64")
        array[:] = coded(root.rank, 100)
        if root.rank:
            del array
        part.close()
        assert len(root.windows) == (root.size > 1)
        assert root.rank or np.array_equal(array, coded(0, 100))
        bind(
            root, np.empty(512), algorithm="shared"
        )  # a window of this size is there, but one rank uses it
        assert len(root.windows) == (2 if root.size > 1 else 0)
        root.close()
        assert len(root.windows) == 0

    def law_a_transport_is_closed_after_its_parts(self, root):
        bound(root, 5001, "shared")
        part = root.split(root.rank % 2 or root.size == 2)
        inner = part.split(0)
        borrower = bound(inner, 5001, "shared")
        for _ in range(2):
            text = raises_comm_error(root.close)
            assert "but rank 0 has 2 open part(s)" in text and "Close the parts on" in text
            assert is_right(inner, *borrower)
        part.close()
        inner.close()
        root.close()
        assert len(root.windows) == 0

    def law_a_reduction_whose_window_is_gone_is_refused(self, root):
        reductions = [bound(root, count, "shared")[1] for count in (16, 5001)]
        for count in (16, 5001):
            reductions.append(Group(root, "shared").bind_reduce_scatter(np.empty(count)))
            reductions.append(Group(root, "shared").bind_all_gather(np.empty(count)))
        root.close()
        for reduction in reductions if root.size > 1 else ():
            for begin in (reduction.run, reduction.start):
                assert f"rank {root.rank}: a reduction through shared memory" in raises_comm_error(
                    begin
                )
