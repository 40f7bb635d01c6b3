"""Modes, pipelines, and ranks that share layers, over MPI."""

import numpy as np
import pytest

from mpitrain.transport.mpi import connect
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel import test_tensor
from tests.ranks.parallel.test_averaging import BASE, trained
from tests.ranks.pipeline import test_pipelines
from tests.training import TINY, configured, curve


@pytest.mark.parametrize(
    "mpi_ranks, algorithm", [(1, "ring"), (2, "native"), (3, "shared"), (4, "ring")]
)
def test_the_curve_is_the_same_on_one_to_four_ranks(mpi_ranks, algorithm, transport):
    config = configured(*TINY, "precision.compute=float64", f"replication.algorithm={algorithm}")
    alone, found = run_ranks(1, curve, config)[0], curve(transport, config)
    assert np.ptp(alone[0]) > 0.05
    for one, other in zip(found, alone, strict=True):
        assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(other))


@pytest.mark.parametrize("mpi_ranks", [3])
@pytest.mark.parametrize("mode", ("master", "local", "gossip"))
def test_a_mode_computes_over_mpi_what_it_does_on_threads(mpi_ranks, mode):
    transport, settings = connect(), [*BASE, f"replication.mode={mode}", "replication.period=3"]
    on_threads = run_ranks(mpi_ranks, trained, settings)[transport.rank]
    for one, other in zip(on_threads, trained(transport, settings), strict=True):
        assert np.all(np.abs(one - other) <= 1e-9 + 1e-9 * np.abs(one))


@pytest.mark.parametrize(
    "mpi_ranks, dp, name, zero",
    [(3, 1, "1f1b", 0), (3, 1, "v-half", 0), (4, 2, "breadth-first", 3)],
)
def test_a_pipeline_computes_over_mpi_what_it_does_on_threads(mpi_ranks, dp, name, zero):
    transport = connect()
    settings = test_pipelines.layout(
        dp, mpi_ranks // dp, name, 6, "model.tied=true", f"replication.zero={zero}"
    )
    numbers, tensors, _ = run_ranks(mpi_ranks, test_pipelines.trained, settings)[transport.rank]
    over_mpi, found, _ = test_pipelines.trained(transport, settings)
    assert (
        np.all(np.abs(over_mpi - numbers) <= 1e-9 + 1e-9 * np.abs(numbers))
        and found.keys() == tensors.keys()
    )
    assert all(np.all(np.abs(found[tensor][1] - tensors[tensor][1]) <= 1e-9) for tensor in tensors)


@pytest.mark.parametrize("mpi_ranks", [3])
def test_ranks_that_share_layers_train_over_mpi_as_one_rank_does(mpi_ranks):
    base = [*test_tensor.GPT, "model.tied=true"]
    alone = run_ranks(1, test_tensor.curve, configured(*base))
    transport, shared = connect(), [*base, f"layout.tp={mpi_ranks}"]
    for rows in ("false", "true"):
        config = configured(*shared, f"layout.sequence_parallel={rows}")
        test_tensor.check_equal(alone, [test_tensor.curve(transport, config)])
