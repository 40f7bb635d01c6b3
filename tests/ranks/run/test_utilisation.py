"""Model and hardware FLOPs of a step, and the GEMM peak that they are compared with."""

import json
import stat
import sys
import threading

import numpy as np
import pytest

from mpitrain.machine import compiling, cuda
from mpitrain.models.table import MODELS
from mpitrain.ops import OPERATIONS
from mpitrain.ops.device import device_for
from mpitrain.ops.host import layers
from mpitrain.ops.host.passes import by_numpy
from mpitrain.run import utilisation as measuring
from mpitrain.run.build import build
from mpitrain.run.count import step
from mpitrain.run.utilisation import StepFlops, gemm_peak, work_of
from mpitrain.trace.timeline import read_timeline
from mpitrain.transport.threads import run_ranks
from tests.fakes import cupy, gpu
from tests.processes import run
from tests.rows import replaced
from tests.runs import go, records
from tests.training import MLP, TINY, configured

pytestmark = pytest.mark.counted

TINY, MLP = ([*keys, "memory.limit_gb=1e6"] for keys in (TINY, MLP))
"""Jobs that count their step: it has a limit."""


def works(ranks, *settings):
    """The work of a step, the configuration and the parameters, as each rank finds them."""

    def run(transport):
        job = build(transport, config)
        trainer = job.trainer
        found = work_of(job, trainer.parameter_count)
        return found, trainer.job.counts, trainer.parameter_count

    config = configured(*settings)
    return run_ranks(ranks, run), config


SEEN = {
    (): [8, 8],
    ("model.window=3",): [3, 3],
    ("model.window=3", "model.window_from=1"): [8, 3],
    ("model.window=9",): [8, 8],
}
"""{settings of a window: the keys that a query sees in each of two layers}."""


@pytest.mark.parametrize("window", SEEN, ids=str)
def test_a_gpt_has_the_flops_of_palm(window):
    own = *TINY, "model.layers=2", "model.context=8", *window
    ((found, _, parameters),), config = works(1, *own)
    context = config.model.context
    each = 6 * parameters + 12 * config.model.width * sum(SEEN[window])
    assert found.model == found.hardware == config.batch.size * context * each


@pytest.mark.parametrize("window", SEEN, ids=str)
def test_counted_flops_are_palms_for_parameters_in_products(window):
    row, own = MODELS["gpt"], (*TINY, "model.layers=2", "model.context=8", *window)
    with replaced(MODELS, "gpt", row._replace(flops=None)):
        ((found, counted, parameters),), config = works(1, *own)
    m = config.model
    width, vocabulary, context = m.width, 256, m.context
    unread = (vocabulary + context) * width + (2 * m.layers + 1) * 2 * width + m.layers * 9 * width
    each = 6 * (parameters - unread) + 12 * width * sum(SEEN[window])
    assert found.model == found.hardware == counted.flops == config.batch.size * context * each


@pytest.mark.parametrize(
    "settings", [[*MLP, "layout.tp=2"], [*MLP, "layout.pp=2"], [*MLP, "layout.dp=2"]]
)
def test_ranks_together_execute_the_work_of_one(settings):
    ((alone, *_),), _ = works(1, *MLP)
    found, _ = works(2, *settings)
    assert all(work == alone for work, *_ in found)
    together = sum(counted.flops for _, counted, _ in found)
    # The last layer is not divided where two hidden layers come before it.
    assert together == alone.model or "layout.tp=2" in settings


def test_rates_are_fractions_of_the_peak():
    assert StepFlops(6e9, 8e9).rates(0.5, 32e9) == {"mfu": 0.375, "hfu": 0.5}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        compiling.os.path, "expanduser", lambda path: path.replace("~", str(tmp_path))
    )
    monkeypatch.setattr(measuring, "BUDGET", 0.01)
    return tmp_path / ".cache/mpitrain/gemm-peak"


def test_the_peak_is_measured_once_for_each_dtype_and_number_of_ranks(folder, monkeypatch):
    device, dtype = device_for("cpu"), np.dtype("float32")
    first = gemm_peak(device, dtype, 1, "")
    assert first > 0 and not stat.S_IMODE(folder.stat().st_mode) & 0o077
    monkeypatch.setattr(measuring, "_measured", lambda *arguments: 7.0)
    assert gemm_peak(device, dtype, 1, "") == first
    assert gemm_peak(device, dtype, 2, "") == 7.0
    assert gemm_peak(device, np.dtype("float64"), 1, "") == 7.0
    assert len([*folder.iterdir()]) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text(json.dumps({"facts": {}, "flops_per_s": 5.0})),
        lambda path: path.write_text(path.read_text().replace("7.0", "-1")),
        lambda path: path.write_text(path.read_text().replace("7.0", "NaN")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_file_that_is_no_peak_is_measured_again(folder, monkeypatch, spoil):
    device, dtype = device_for("cpu"), np.dtype("float32")
    monkeypatch.setattr(measuring, "_measured", lambda *arguments: 7.0)
    gemm_peak(device, dtype, 1, "")
    (path,) = folder.iterdir()
    spoil(path)
    monkeypatch.setattr(measuring, "_measured", lambda *arguments: 8.0)
    assert gemm_peak(device, dtype, 1, "") == 8.0


def test_a_rate_that_a_busy_machine_had_is_replaced(folder, monkeypatch):
    device, dtype = device_for("cpu"), np.dtype("float32")
    for measured, peak in ((7.0, 7.0), (9.0, 9.0), (8.0, 9.0)):
        monkeypatch.setattr(measuring, "_measured", lambda *arguments, found=measured: found)
        assert gemm_peak(device, dtype, 1, "") == peak


@pytest.mark.compile
def test_the_peak_of_a_gpu_is_measured_on_copied_random_numbers(tmp_path, monkeypatch):
    """CuPy's own fill compiles a kernel, and equal numbers draw less power, so that a GPU is faster."""
    gpu.play(monkeypatch)
    monkeypatch.setattr(measuring, "cache_of", lambda what: tmp_path)
    monkeypatch.setattr(measuring, "BUDGET", 0.01)
    monkeypatch.setitem(measuring.SIDES, "cuda", 64)
    device, operands = device_for("cuda"), []

    def multiply(kernels, arena, a, b, c):
        operands[:] = [device.backend.to_host(a), device.backend.to_host(b)]

    assert gemm_peak(device._replace(multiply=multiply), np.dtype("float32"), 1, "") > 0
    assert all(len(np.unique(array)) > array.size / 2 for array in operands)


@pytest.mark.compile
def test_a_simulated_device_has_no_peak():
    assert gemm_peak(device_for("cuda-sim"), np.dtype("float32"), 1, "") is None


@pytest.mark.parametrize("kind, names", [("cpu", {"mfu", "hfu"}), ("cuda-sim", set())])
def test_a_run_records_its_utilisation_and_what_was_counted(kind, names, book, tmp_path):
    settings = [
        *book,
        f"device.kind={kind}",
        "memory.limit_gb=1e6",
        "run.steps=3",
        "run.eval_every=-1",
    ]
    go(1, settings)
    lines = [record for record in records(tmp_path) if "loss" in record]
    assert all(names == {"mfu", "hfu"} & set(line) for line in lines)
    assert all(line[name] > 0 and line["mfu"] == line["hfu"] for line in lines for name in names)
    (trace,) = read_timeline(tmp_path / "run").traces
    counted = trace.facts["counted_activation_bytes"]
    assert 0 < counted <= trace.facts["peak_activation_bytes"]
    assert trace.facts["counted_growth_bytes"] > counted and trace.facts["grown_bytes"] >= 0


def test_recomputation_adds_to_the_flops_of_the_hardware_alone():
    ((plain, *_),), _ = works(1, *TINY)
    ((found, counted, _),), _ = works(1, *TINY, "memory.recompute=unit")
    assert found.model == plain.model == plain.hardware
    assert found.hardware - found.model == counted.recomputed > 0


def test_a_job_on_the_host_without_a_limit_of_memory_loads_no_counter(book, tmp_path):
    """Its FLOPs follow from a formula."""
    program = (
        "import sys\n"
        "from tests.runs import go\n"
        f"go(1, {[*book, 'run.steps=2']!r})\n"
        "assert not [name for name in sys.modules if 'run.count' in name]\n"
    )
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    assert any("mfu" in line for line in records(tmp_path))


def test_a_job_with_an_operation_that_needs_memory_runs_uncounted(book, tmp_path):
    row = OPERATIONS["layer_norm"]

    def by_address(x, *rest):
        assert x.ctypes.data
        return layers.layer_norm(by_numpy, x, *rest)

    with replaced(OPERATIONS, "layer_norm", row._replace(host=by_address)):
        keys = ["run.steps=1", "run.eval_every=-1", "device.passes=numpy", "memory.limit_gb=1e6"]
        go(1, [*book, *keys, "memory.recompute=unit"])
    first, *lines = records(tmp_path)
    assert first["uncounted"].startswith("NoAddress") and not any("mfu" in line for line in lines)
    (trace,) = read_timeline(tmp_path / "run").traces
    assert "counted_activation_bytes" not in trace.facts


@pytest.mark.parametrize("limit", [0, 1e6], ids=["for its rate alone", "for its memory too"])
def test_a_fault_of_our_own_in_counting_ends_the_job_and_a_plugin_s_does_not(
    limit, book, tmp_path, monkeypatch
):
    def broken(*rest):
        raise ZeroDivisionError("by counting")

    monkeypatch.setattr(step.Counter, "step", broken)
    words = [*book, "run.steps=1", "memory.recompute=unit", f"memory.limit_gb={limit}"]
    with pytest.raises(ZeroDivisionError, match="by counting"):
        go(1, words)
    monkeypatch.setattr(type(MODELS), "is_added", lambda table, kind: True)
    go(1, [*words, f"run.out={tmp_path / 'other'}"])


def test_ranks_of_each_gpu_are_counted_and_a_group_without_access_is_named_once(
    tmp_path, monkeypatch, capsys
):
    """Ranks 0, 1 and 2, 3 are the groups along dp; each pair has a GPU, and only rank 3 reads wrong memory."""
    gpu.play(monkeypatch)

    def rank():
        return int(threading.current_thread().name[-1])

    monkeypatch.setattr(cupy.ipc, "lies", lambda: rank() == 3)
    monkeypatch.setattr(cupy, "_gpus", lambda: ("01"[rank() // 2], *"01"))
    monkeypatch.setattr(cuda, "_allocation_start", cupy.allocation_start)
    sharing = []
    monkeypatch.setattr(measuring, "gemm_peak", lambda *facts: sharing.append(facts[2]))
    settings = ["layout.dp=2", "layout.pp=2", "device.kind=cuda", "device.cuda_aware=no"]
    go(4, [*TINY, *MLP, *settings, "run.steps=1", f"run.out={tmp_path / 'run'}"])
    assert sharing == [2] * 4
    said = [line for line in capsys.readouterr().err.splitlines() if "exchange messages" in line]
    assert len(said) == 1 and "Among ranks 2, 3, counted from 0: " in said[0]
