"""Which device a run computes on: what is missing is said, what is shared is said, `auto` is settled by all ranks."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mpitrain.config import parse
from mpitrain.errors import ConfigError
from mpitrain.machine import compiling, process
from mpitrain.machine.backend import size_class
from mpitrain.ops import device as devices
from mpitrain.ops.device import backend_for
from mpitrain.run.build import build
from mpitrain.run.job import agree_on
from mpitrain.transport import device
from mpitrain.transport.device import (
    Direct,
    Staged,
    cuda_messages,
    exchange_is_right,
    over_device,
    self_test,
)
from mpitrain.transport.library import Awareness
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy
from tests.fakes.pointers import PointerThreads
from tests.processes import run
from tests.training import TINY, configured

pytestmark = pytest.mark.slow


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine with CuPy and a GPU."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy.devices, "count", 1)
    monkeypatch.setattr(cupy.devices, "used", [])
    monkeypatch.setattr(cupy.devices, "current", threading.local())
    return cupy.devices


def refusal(kind):
    with pytest.raises(ConfigError) as raised:
        backend_for(kind)
    assert raised.value.exit_code == 2
    return raised.value.named()


def test_what_cuda_lacks_is_said(one_gpu, monkeypatch):
    one_gpu.count = 0
    assert "CUDA_VISIBLE_DEVICES, or use --device" in refusal("cuda"), "every GPU is hidden"
    one_gpu.count = None
    text = refusal("cuda")
    assert "needs a GPU and" in text and "`nvidia-smi` must list a GPU" in text
    assert process.gpus() == 0
    monkeypatch.setitem(sys.modules, "cupy", None)
    text = refusal("cuda")
    assert text.startswith("ConfigError: device.kind cuda needs CuPy, but it cannot be imported: ")
    assert "'mpitrain[cuda13]', or [cuda12]; or use --device" in text
    assert process.gpus() == 0


def test_the_simulator_says_where_it_cannot_work(no_compiler, monkeypatch):
    assert "11 or later on x86-64," in refusal("cuda-sim")
    monkeypatch.setattr(compiling.platform, "machine", lambda: "aarch64")
    assert "machine is aarch64." in refusal("cuda-sim")


@pytest.mark.parametrize(
    "gpus, kind", [((1, 1, 2), "cuda"), ((1, 0, 1), "cpu"), ((0, 0, 0), "cpu")]
)
def test_auto_is_cuda_where_every_rank_finds_a_gpu(gpus, kind, one_gpu, monkeypatch):
    def run(transport):
        return agree_on(transport, lambda: parse({})).config.device.kind

    seen = iter(gpus * 2)
    monkeypatch.setattr(process, "gpus", lambda: next(seen))
    assert run_ranks(3, run) == [kind] * 3


def test_a_rank_with_a_gpu_and_one_without_begin_a_run_together(one_gpu, monkeypatch):
    """The one without has opened the data before both know that the kind is cpu."""
    here, config = threading.local(), configured(*TINY, "device.kind=auto")
    monkeypatch.setattr(process, "gpus", lambda: getattr(here, "seen", 0))

    def kind(transport):
        here.seen = transport.rank
        return build(transport, config).config.device.kind

    assert run_ranks(2, kind) == ["cpu", "cpu"]


def test_what_auto_has_become_is_held_to_its_laws(one_gpu):
    with pytest.raises(ConfigError, match=r"but device\.kind") as raised:
        run_ranks(
            2,
            lambda transport: agree_on(
                transport, lambda: parse({"replication": {"wire": "topk:0.01"}})
            ),
        )
    assert raised.value.agreed
    config = parse({"run": {"seed": 3}})
    (found,) = run_ranks(1, lambda transport: agree_on(transport, lambda: config))
    became = {"device.kind": "cuda", "batch.micro_batches": 1}
    assert found.config.flat() == config.flat() | became


def resolved_with(hosts, address):
    """Resolve a configuration on ranks of these hosts, each with the GPU of this PCI address."""

    def resolves(transport):
        cupy.see(address(transport.rank))
        agree_on(transport, lambda: parse({"device": {"kind": "cuda"}}))

    run_ranks(len(hosts), resolves, hosts=hosts)


def test_ranks_with_the_same_gpu_are_found_by_its_pci_address(one_gpu, capsys):
    one_gpu.count = 4
    resolved_with("aaab", lambda rank: f"0000:0{rank // 2}:00.0")
    said = capsys.readouterr().err
    assert "ranks 0, 1 on a" in said and "0000:00:00.0" in said and said.count("warning") == 1


@pytest.mark.parametrize(
    "gpus, hosts, chosen, line",
    [
        (1, "aab", "000", "2 ranks on a share 1 GPU"),
        (2, "aaabbb", "010101", "3 ranks on a share 2 GPUs; 3 ranks on b share 2 GPUs"),
        (2, "aabb", "0101", ""),
        (1, "aabb", "0101", ""),  # each rank sees its own GPU alone
        (1, "aaaa", "0011", "4 ranks on a share 2 GPUs"),
    ],
)
def test_sharing_a_gpu_is_said_in_one_line(gpus, hosts, chosen, line, one_gpu, capsys):
    one_gpu.count = gpus
    resolved_with(hosts, lambda rank: f"0000:0{chosen[rank]}:00.0")
    assert capsys.readouterr().err == (
        line and f"warning: {line}: they take turns, and each needs its own memory.\n"
    )


@pytest.mark.parametrize(
    "kind, local_rank, gpus, used",
    [
        ("cuda", 3, 4, [3]),
        ("cuda", 5, 4, [1]),
        ("auto", 1, 2, [1]),
        ("cpu", 1, 2, []),
        ("cuda-sim", 1, 2, []),
        ("cuda", 1, 0, []),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank(kind, local_rank, gpus, used, one_gpu, monkeypatch):
    one_gpu.count = gpus
    monkeypatch.setattr(
        process, "launched", lambda: process.Launched("Open MPI", local_rank, 8, local_rank, 8)
    )
    process.choose_gpu(kind)
    assert one_gpu.used == used


def test_ranks_that_are_threads_take_the_gpu_that_was_chosen(one_gpu):
    cupy.cuda.Device(3).use()
    assert run_ranks(2, lambda transport: cupy.cuda.runtime.getDevice()) == [3, 3]


def test_each_gpu_of_a_process_has_kernels_of_its_own(one_gpu, monkeypatch):
    """A module is loaded on one GPU; two threads may use two."""
    one_gpu.count = 2

    def engine(cupy):
        time.sleep(0.02)  # as long as other threads need to ask, too
        return SimpleNamespace(takes_plain=True)

    monkeypatch.setattr("mpitrain.kernels.cuda.CudaEngine", engine)
    devices._on_gpu.cache_clear()

    def kernels(transport):
        cupy.cuda.Device(transport.rank % 2).use()
        transport.barrier()
        return [id(devices.KERNELS["cuda"]()) for _ in range(2)]

    first, second, third = run_ranks(3, kernels)
    assert first == third and first[0] == first[1] != second[0] == second[1]
    devices._on_gpu.cache_clear()


def test_a_gpu_is_chosen_before_mpi_starts(tmp_path):
    code = (
        "import sys\n"
        "from tests.fakes import cupy\n"
        "sys.modules['cupy'] = cupy\n"
        "from mpitrain.cli import session\n"
        "choose = session.process.choose_gpu\n"
        "def chosen(kind):\n"
        "    assert 'mpi4py.MPI' not in sys.modules and 'numpy' in sys.modules and kind == 'cuda', kind\n"
        "    choose(kind); print('chosen', cupy.devices.used)\n"
        "session.process.choose_gpu = chosen\n"
        "from mpitrain.cli import main\n"
        f"main(['train', '--device', 'cuda', '--set', 'run.steps=-1', '--out', {str(tmp_path)!r}])\n"
    )
    done = run([sys.executable, "-c", code])
    assert "run.steps must be" in done.stderr, done.stderr
    assert "chosen" not in done.stdout, "a configuration that is refused needs no GPU"
    done = run([sys.executable, "-c", code.replace("run.steps=-1", "data.source=text:missing")])
    assert "chosen [0]" in done.stdout and done.returncode == 2, done.stderr


def test_the_environment_of_one_knows_no_ranks(monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_PROCID", "MPI_LOCALRANKID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    alone = process.environment_of_one()
    assert alone["OMPI_MCA_pml"] == "ucx" and "PATH" in alone
    assert not any(name.startswith(("OMPI_COMM", "PMI", "SLURM", "MPI_LOCAL")) for name in alone)


CHILDREN = {
    "pass": (True, "and a self-test moved GPU memory"),
    f"import sys; sys.exit({device.WRONG})": (False, "but a self-test received wrong data"),
    "import os; os.kill(os.getpid(), 11)": (False, "but a self-test crashed (SIGSEGV)"),
    "raise OSError('no such device')": (False, "but a self-test failed: OSError: no such device"),
    "import time; time.sleep(60)": (False, "but a self-test was still waiting after 1 s"),
}


@pytest.mark.parametrize("code", CHILDREN)
def test_only_right_data_is_a_yes(code):
    answer = self_test((sys.executable, "-c", code), {}, 1.0 if "sleep" in code else 30.0)
    assert answer == CHILDREN[code]


def test_the_self_test_tells_right_from_wrong(one_gpu):
    class Loses(PointerThreads):
        """An MPI that takes the pointer of a receive and leaves its memory as it was."""

        def start_recv(self, array, source, tag=0):
            return super().start_recv(array.reshape(-1).truth.copy(), source, tag)

    def run(transport):
        gpu = backend_for("cuda")
        return [
            exchange_is_right(Direct(mpi, gpu), gpu)
            for mpi in (PointerThreads(transport), Loses(transport))
        ]

    assert run_ranks(1, run) == [[True, False]]


@pytest.mark.skipif(process.gpus() > 0, reason="there is a GPU here")
def test_the_child_without_a_gpu_is_a_no():
    answer = self_test(device.CHILD, process.environment_of_one(), 60)
    assert not answer.cuda and "failed: device.kind" in answer.how


@pytest.mark.parametrize(
    "setting, asked, tried, carrier, how",
    [
        ("yes", None, None, Direct, "device.cuda_aware = yes"),
        ("no", None, None, Staged, "device.cuda_aware = no"),
        ("auto", False, None, Staged, "says the library"),
        ("auto", True, True, Direct, "says the library, and it worked"),
        ("auto", True, False, Staged, "says the library, and it worked"),
    ],
)
def test_the_way_of_messages_is_forced_or_asked_and_tried(
    setting, asked, tried, carrier, how, one_gpu, monkeypatch
):
    trials = []
    monkeypatch.setattr(
        device, "cuda_awareness", lambda path, environment: Awareness(asked, "the library")
    )
    monkeypatch.setattr(
        device, "self_test", lambda *_: trials.append(1) or Awareness(tried, "and it worked")
    )

    def run(transport):
        made = over_device(transport, backend_for("cuda"), setting)
        return type(made), cuda_messages(transport, setting).how

    assert run_ranks(4, run, hosts="aabb") == [(carrier, how)] * 4
    assert len(trials) == (4 if asked else 0), "one child on each host, each time it is asked"


def test_one_host_that_cannot_decides_for_all(monkeypatch):
    monkeypatch.setattr(
        device, "cuda_awareness", lambda path, environment: Awareness(True, "the library")
    )
    answers = {"a": Awareness(True, "and it worked"), "b": Awareness(False, "but it crashed")}

    def run(transport):
        here = transport.hosts[transport.rank]
        monkeypatch.setattr(device, "self_test", lambda *_: answers[here])
        return cuda_messages(transport, "auto").cuda

    assert run_ranks(2, run, hosts="bb") == [False] * 2
    assert run_ranks(2, run, hosts="aa") == [True] * 2


@pytest.mark.compile
def test_host_backends_keep_their_transport():
    transport = object()
    for kind in ("cpu", "cuda-sim"):
        assert over_device(transport, backend_for(kind), "auto") is transport


def test_a_cuda_arena_serves_from_what_came_back(one_gpu):
    arena = backend_for("cuda").arena()
    first = arena.take((3, 5), "float32")
    view, place = first[1:], first.data.ptr
    assert (arena.live, arena.allocations) == (64, 1)
    del first
    assert arena.live == 64, "a view keeps its memory"
    del view
    assert (arena.live, arena.peak) == (0, 64)
    assert arena.take((2,), "float64").data.ptr == place and arena.allocations == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_arena_leases_by_class_and_counts_free_bytes(kind, one_gpu):
    arena = backend_for(kind).arena()
    for count, live, held, allocations in (
        (100_000, 100_032, 106_496, 1),
        (106_400, 106_432, 106_496, 1),
        (106_497, 106_560, 106_496 + 114_688, 2),
        (1, 64, 106_496 + 114_688 + 64, 3),
    ):
        taken = arena.take((count,), "uint8")
        assert (arena.live, arena.held, arena.allocations) == (live, held, allocations), count
        del taken
    assert (arena.live, arena.peak, arena.held) == (0, 106_560, 106_496 + 114_688 + 64)
    classes = {size_class(nbytes) for nbytes in range(64 << 10, (128 << 10) + 1, 64)}
    assert classes == {*range(64 << 10, (128 << 10) + 1, 8 << 10)}, "eight to the next power of two"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_arena_s_bfloat16_is_bfloat16_and_no_two_bytes_of_anything(kind, one_gpu):
    arena = backend_for(kind).arena()
    taken = arena.take((4, 4), "bfloat16")
    assert (taken.dtype.name, taken.shape, arena.live) == ("bfloat16", (4, 4), 64)
    del taken
    assert arena.live == 0
