"""What every wire format must do, over any transport."""

import hashlib
import math

import numpy as np

from mpitrain.collectives.compression import RECENT, Matrix, bind_lossy, tiles
from mpitrain.collectives.engine.arithmetic import BLOCK, CODECS, parse_wire
from mpitrain.transport.native import native_all_reduce
from tests.laws.collectives import measured
from tests.laws.transport import raises_comm_error

FORMATS = ("fp16", "bf16", "int8", "topk:0.1", "topk:1", "powersgd:1", "powersgd:4")
BOUNDS = {"fp16": 2**-11, "bf16": 2**-8, "int8": 0.5 / 127}
"""Rounding error of one coding, relative to the largest number of the block."""
COUNTS = (1, 2, 64, 1001, 20_011)


def brought(rank: int, step: int, count: int) -> np.ndarray:
    """Gaussian data that depend on everything."""
    return np.random.default_rng((rank, step, count)).standard_normal(count).astype(np.float32)


class LossyLaws:
    """A law is a function of one rank's transport; all ranks run it together."""

    def law_all_ranks_hold_the_same_bits(self, transport):
        for name in FORMATS:
            for count in (0, *COUNTS):
                array = np.empty(count, np.float32)
                reduction = bind_lossy(transport, array, parse_wire(name))
                for step in range(3):
                    array[:] = brought(transport.rank, step, count)
                    reduction.run() if step % 2 else (reduction.start(), reduction.wait())
                    assert len(set(transport.gather_text(hashlib.sha1(array).hexdigest()))) == 1, (
                        name,
                        count,
                    )

    def law_coded_sums_are_as_near_as_their_rounding(self, transport):
        n = transport.size
        for name, bound in BOUNDS.items():
            for count in COUNTS:
                array = brought(transport.rank, 0, count)
                bind_lossy(transport, array, parse_wire(name)).run()
                truth = sum(brought(rank, 0, count).astype(np.float64) for rank in range(n))
                largest = max(np.abs(brought(rank, 0, count)).max() for rank in range(n))
                error = np.abs(array - truth).max()
                assert error <= bound * ((n - 1) * largest + np.abs(truth).max() * (1 + bound)) * (
                    1 + 1e-5
                ), (name, error)

    def law_fp16_sums_are_as_near_at_any_magnitude(self, transport):
        n = transport.size
        for size in (1e-44, 1e-38, 1e-20, 1e-6, 1e5, 1e37):
            for count in (1, 1001):
                parts = [(brought(rank, 0, count) * size).astype(np.float32) for rank in range(n)]
                array = parts[transport.rank].copy()
                bind_lossy(transport, array, parse_wire("fp16")).run()
                truth = np.sum(parts, axis=0, dtype=np.float64)
                sums = np.abs(parts).sum(axis=0, dtype=np.float64)
                assert np.isfinite(array).all() and np.any(array)
                assert (np.abs(array - truth) <= 2**-11 * 2.01 * sums).all(), size

    def law_nothing_is_lost_over_steps_and_ranks(self, transport):
        for name in ("topk:0.1", "powersgd:4"):
            for count in COUNTS:
                array = np.empty(count, np.float32)
                reduction = bind_lossy(transport, array, parse_wire(name))
                before = np.zeros(count)
                for step in range(4):
                    array[:] = brought(transport.rank, step, count)
                    put_in = sum(
                        brought(rank, step, count).astype(np.float64)
                        for rank in range(transport.size)
                    )
                    reduction.run()
                    kept = reduction.state["residual"].astype(np.float64)
                    native_all_reduce(transport, kept)
                    assert np.abs(array + kept - put_in - (1 - RECENT) * before).max() <= 1e-4, (
                        name,
                        count,
                    )
                    before = kept

    def law_the_average_of_past_sums_is_the_prediction(self, transport):
        n, count = transport.size, 900
        for name in ("topk:0.1", "powersgd:4"):
            array, average = np.empty(count, np.float32), np.zeros(count)
            reduction = bind_lossy(transport, array, parse_wire(name))
            right = n * brought(0, 0, count).astype(np.float64)
            for _ in range(80):
                array[:] = brought(
                    0, 0, count
                )  # the same in every step and on all ranks: in the end it is predicted
                reduction.run()
                average += RECENT * (array - average)
                assert np.abs(reduction.state["prediction"] - average).max() <= 1e-5 * (
                    1 + np.abs(average).max()
                ), name
            assert np.linalg.norm(average - right) <= 0.1 * np.linalg.norm(right), name

    def law_topk_of_everything_is_the_sum(self, transport):
        array = np.arange(1001, dtype=np.float32) + transport.rank
        reduction = bind_lossy(transport, array, parse_wire("topk:1"))
        reduction.run()
        n = transport.size
        assert np.array_equal(array, n * np.arange(1001) + n * (n - 1) // 2)
        assert not reduction.state["residual"].any()

    def law_topk_sends_the_largest(self, transport):
        array = np.zeros(1000, np.float32)
        places = [7 * transport.rank + 3, 999 - transport.rank]
        array[places] = 5, -7
        array[500] = 1
        reduction = bind_lossy(transport, array, parse_wire("topk:0.002"))
        reduction.run()
        right = np.zeros(1000)
        for rank in range(transport.size):
            right[7 * rank + 3] += 5
            right[999 - rank] -= 7
        assert np.array_equal(array, right)
        residual = reduction.state["residual"]
        assert residual[500] == 1 and np.count_nonzero(residual) == 1

    def law_powersgd_keeps_matrices_of_low_rank_and_all_that_is_no_matrix(self, transport):
        rows, columns, before, after = 30, 20, 7, 5
        matrix = Matrix(before, rows, columns, columns)
        array = np.empty(before + rows * columns + after, np.float32)
        reduction = bind_lossy(transport, array, parse_wire("powersgd:4"), [matrix])
        u, v = np.random.default_rng(1).standard_normal((2, 40, 2))
        low = (
            u[:rows] @ v[:columns].T
        )  # the same column space on all ranks, so that their sum has rank 2 as well
        for _ in range(3):
            array[:] = transport.rank + 1
            array[before : before + low.size] = ((transport.rank + 1) * low).reshape(-1)
            reduction.run()
        total = transport.size * (transport.size + 1) // 2
        assert np.array_equal(array[:before], np.full(before, total))
        assert np.array_equal(array[-after:], np.full(after, total))
        assert np.abs(array[before:-after] / total - low.reshape(-1)).max() <= 1e-3

    def law_powersgd_loses_nothing_in_tiles_across_rows_and_columns(self, transport):
        matrices = [*tiles(7, 20, 61), *tiles(1300, 61, 20)]
        array, before = np.empty(3007, np.float32), np.zeros(3007)
        reduction = bind_lossy(transport, array, parse_wire("powersgd:2"), matrices)
        outside = np.ones(3007, bool)
        for matrix in matrices:
            matrix.of(outside)[:] = False
        for step in range(4):
            array[:] = brought(transport.rank, step, 3007)
            put_in = sum(
                brought(rank, step, 3007).astype(np.float64) for rank in range(transport.size)
            )
            reduction.run()
            kept = reduction.state["residual"].astype(np.float64)
            native_all_reduce(transport, kept)
            assert np.abs(array + kept - put_in - (1 - RECENT) * before).max() <= 1e-4
            assert np.abs(array - put_in)[outside].max() <= 1e-5 and not kept[outside].any()
            before = kept
        assert all(np.linalg.matrix_rank(matrix.of(kept)) > 2 for matrix in matrices)

    def law_a_sum_that_travelled_whole_is_learnt_while_residuals_fade(self, transport):
        for name in ("topk:0.1", "powersgd:4"):
            array = brought(transport.rank, 0, 1001)
            reduction = bind_lossy(transport, array, parse_wire(name))
            reduction.run()
            residual, prediction = (
                reduction.state[kind].copy() for kind in ("residual", "prediction")
            )
            whole = brought(0, 1, 1001)
            reduction.learn(whole)
            assert residual.any() and np.allclose(
                reduction.state["residual"], (1 - RECENT) * residual, 1e-5, 1e-7
            ), name
            learnt = prediction + RECENT * (whole - prediction)
            assert np.abs(reduction.state["prediction"] - learnt).max() <= 1e-5, name
            whole[17] = np.nan
            reduction.learn(whole)
            assert np.abs(reduction.state["prediction"] - learnt).max() <= 1e-5, (
                name,
                "not finite",
            )

    def law_what_is_not_finite_teaches_nothing(self, transport):
        for name in ("topk:0.1", "powersgd:4"):
            array = np.empty(1001, np.float32)
            reduction = bind_lossy(transport, array, parse_wire(name))
            for step, bad in enumerate((0, np.nan, 0, np.inf, 0)):
                array[:] = brought(transport.rank, step, 1001)
                array[17] += bad if transport.rank == transport.size - 1 else 0
                before = reduction.state["prediction"].copy()
                with np.errstate(all="ignore"):
                    reduction.run()
                after = reduction.state["prediction"]
                assert (
                    np.isfinite(array).all() == np.isfinite(bad) != np.array_equal(before, after)
                ), (name, step)
                assert len(set(transport.gather_text(hashlib.sha1(after).hexdigest()))) == 1, (
                    name,
                    step,
                )

    def law_what_is_not_finite_stays_so_on_every_rank(self, transport):
        for name in FORMATS:
            for bad in (np.nan, np.inf):
                array = np.ones(1001, np.float32)
                reduction = bind_lossy(transport, array, parse_wire(name))
                if transport.rank == transport.size - 1:
                    array[17] = bad
                with np.errstate(all="ignore"):
                    reduction.run()
                assert not np.isfinite(array).all(), (name, bad)
                array[:] = 1
                reduction.run()
                assert np.isfinite(array).all(), (name, bad, "the step after")
                assert all(np.isfinite(kept).all() for kept in (reduction.state or {}).values())

    def law_bytes_on_the_wire_are_the_formula(self, transport):
        n = transport.size
        for count in (0, 1, 1001, 20_011):
            array = np.ones(count, np.float32)
            blocks = math.ceil(count / (n * BLOCK))
            for name, codec in CODECS.items():
                sent = measured(transport, bind_lossy(transport, array, parse_wire(name)).run)
                assert sent == (2 * (n - 1), 2 * (n - 1) * blocks * codec.block_bytes), name
            assert (
                CODECS["fp16"].block_bytes == 2 * BLOCK + 4
                and CODECS["int8"].block_bytes == BLOCK + 4
            )
            for part in (0.01, 0.1, 1):
                sent = measured(
                    transport, bind_lossy(transport, array, parse_wire(f"topk:{part}")).run
                )
                assert sent[1] == (n - 1) * 8 * math.ceil(part * count), part
        for k, matrices, count in (
            (2, [Matrix(0, 48, 64, 64)], 3088),
            (1, [*tiles(3, 31, 17), *tiles(600, 5, 77)], 1001),
        ):
            factors = k * sum(m.rows + m.columns for m in matrices)
            outside = count - sum(m.rows * m.columns for m in matrices)
            array = np.ones(count, np.float32)
            sent = measured(
                transport, bind_lossy(transport, array, parse_wire(f"powersgd:{k}"), matrices).run
            )
            floats = sum(transport.gather_text(sent[1])) / 4
            assert floats == 2 * (n - 1) * (factors + outside), k

    def law_other_types_are_refused(self, transport):
        text = raises_comm_error(lambda: bind_lossy(transport, np.ones(3), parse_wire("int8")))
        assert "int8 takes float32," in text
