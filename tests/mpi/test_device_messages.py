"""The laws of messages in GPU memory over mpirun: MPI follows the pointers of a GPU that all ranks share, or of a fake one."""

import sys

import pytest

from mpitrain.ops.device import backend_for
from mpitrain.transport.device import cuda_messages
from tests.fakes import cupy
from tests.laws.device import CARRIERS, DeviceLaws, cuda_backend
from tests.laws.transport import laws_of

LAWS = laws_of(DeviceLaws)
ONLY_A_FAKE_KEEPS_A_LOG = "law_each_start_waits_for_the_stream_once_and_first"


@pytest.mark.product
@pytest.mark.parametrize("mpi_ranks", [3])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("law", LAWS)
def test_mpi_obeys(law, carrier, mpi_ranks, transport, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    getattr(DeviceLaws(), law)(transport, carrier, cuda_backend())


@pytest.mark.gpu
@pytest.mark.product
@pytest.mark.parametrize("mpi_ranks", [1, 2, 4])
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("law", [law for law in LAWS if law != ONLY_A_FAKE_KEEPS_A_LOG])
def test_ranks_on_a_gpu_obey(law, carrier, mpi_ranks, transport):
    aware = cuda_messages(transport, "auto")
    if carrier == "direct" and not aware.cuda:
        pytest.skip(f"GPU pointers do not go to this MPI: it {aware.how}")
    getattr(DeviceLaws(), law)(transport, carrier, backend_for("cuda"))
