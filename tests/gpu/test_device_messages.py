"""The laws of messages in GPU memory on a real one, which all ranks share."""

import pytest

from mpitrain.machine import process
from mpitrain.machine.backend import backend_for
from mpitrain.transport.cuda_aware import cuda_messages
from mpitrain.transport.mpi import connect
from tests.laws.device import CARRIERS, DeviceLaws
from tests.laws.transport import laws_of
from tests.processes import SECONDS

ONLY_A_FAKE_KEEPS_A_LOG = "law_each_start_waits_for_the_stream_once_and_first"


@pytest.mark.gpu
@pytest.mark.mpi(ranks=[1, 2, 4], timeout=SECONDS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_ranks_on_a_gpu_obey(carrier, mpi_ranks):
    process.choose_gpu("cuda")
    backend, transport = backend_for("cuda"), connect()
    aware = cuda_messages(transport, "auto")
    if carrier == "direct" and not aware.cuda:
        pytest.skip(f"GPU pointers do not go to this MPI: it {aware.how}")
    for name in laws_of(DeviceLaws):
        if name != ONLY_A_FAKE_KEEPS_A_LOG:
            try:
                getattr(DeviceLaws(), name)(transport, carrier, backend)
            except BaseException as error:
                error.add_note(f"law: {name}")
                raise
