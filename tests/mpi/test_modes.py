"""Modes, pipelines, and ranks that share layers, over MPI."""

import numpy as np
import pytest

from mpitrain.transport.mpi import connect
from mpitrain.transport.threads import run_ranks
from tests.ranks.parallel import test_averaging, test_tensor
from tests.ranks.pipeline.test_pipelines import SMALL, layout
from tests.training import SERVERLESS, TINY, assert_alike, configured, curve, near, trained


@pytest.mark.parametrize(
    "mpi_ranks, algorithm", [(1, "ring"), (2, "native"), (3, "shared"), (4, "ring")]
)
def test_the_curve_is_the_same_on_one_to_four_ranks(mpi_ranks, algorithm, transport):
    config = configured(*TINY, "precision.compute=float64", f"replication.algorithm={algorithm}")
    alone, found = run_ranks(1, curve, config)[0], curve(transport, config)
    assert np.ptp(alone[0]) > 0.05
    assert near(alone, found)


@pytest.mark.parametrize("mpi_ranks", [3])
@pytest.mark.parametrize("mode", SERVERLESS)
def test_a_mode_computes_over_mpi_what_it_does_on_threads(mpi_ranks, mode):
    transport, settings = (
        connect(),
        [*test_averaging.BASE, f"replication.mode={mode}", "replication.period=3"],
    )
    on_threads = run_ranks(mpi_ranks, test_averaging.trained, settings)[transport.rank]
    assert near(on_threads, test_averaging.trained(transport, settings))


@pytest.mark.parametrize(
    "mpi_ranks, dp, name, zero",
    [(3, 1, "1f1b", 0), (3, 1, "v-half", 0), (4, 2, "breadth-first", 3)],
)
def test_a_pipeline_computes_over_mpi_what_it_does_on_threads(mpi_ranks, dp, name, zero):
    transport = connect()
    settings = layout(dp, mpi_ranks // dp, name, 6, "model.tied=true", f"replication.zero={zero}")
    config = configured(*SMALL, *settings)
    numbers, tensors, _ = run_ranks(mpi_ranks, trained, config, 3)[transport.rank]
    over_mpi, found, _ = trained(transport, config, 3)
    assert near(numbers, over_mpi) and found.keys() == tensors.keys()
    assert all(near([tensors[name][1]], [found[name][1]]) for name in tensors)


@pytest.mark.parametrize("mpi_ranks", [3])
def test_ranks_that_share_layers_train_over_mpi_as_one_rank_does(mpi_ranks):
    base = [*test_tensor.GPT, "model.tied=true"]
    (alone,) = run_ranks(1, test_tensor.curve, configured(*base))
    transport, shared = connect(), [*base, f"layout.tp={mpi_ranks}"]
    for rows in ("false", "true"):
        config = configured(*shared, f"layout.sequence_parallel={rows}")
        assert_alike(alone, [test_tensor.curve(transport, config)])
