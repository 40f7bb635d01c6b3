"""One function makes what belongs to a device, and one list says which kinds there are."""

import sys
from functools import partial
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from mpitrain.collectives.engine.arithmetic import HOST, arithmetic_of
from mpitrain.config import Device as Settings
from mpitrain.errors import ConfigError
from mpitrain.kernels.cuda import CudaEngine
from mpitrain.machine.backend import Arena
from mpitrain.machine.process import KINDS
from mpitrain.ops.device import BACKENDS, KERNELS, device_for, host_ops, ops_for
from mpitrain.ops.host.passes import by_numpy
from tests.fakes import cupy
from tests.processes import run


def test_every_kind_has_what_belongs_to_it_and_nothing_else_has():
    assert set(BACKENDS) == set(KINDS) and set(KERNELS) < set(KINDS)
    assert get_args(Settings.model_fields["kind"].annotation) == ("auto", *KINDS)


def test_an_unknown_kind_is_refused_with_the_kinds_there_are():
    for kind in ("auto", "tpu", "reference"):
        said = rf"no device of kind '{kind}' to compute on.\nName one of cpu, cuda, cuda-sim"
        with pytest.raises(ConfigError, match=said):
            device_for(kind)


def test_on_the_cpu_everything_is_numpy_s(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    device = device_for("cpu", "library", "no such table of tiles")
    assert device.kernels is device.multiply is None

    def bodies(ops):
        """Each operation's function, and the passes and the memory.attention that it is bound to."""
        return {
            name: (run.func, *run.args) if isinstance(run, partial) else run
            for name, run in vars(ops).items()
        }

    assert bodies(device.ops) == bodies(ops_for("cpu")) == bodies(host_ops())
    assert bodies(host_ops())["gelu"][1] is by_numpy
    half = ops_for("cpu", compute="bfloat16")
    (rounded, _), (exact, _) = (
        ops.relu(np.full(1, 1.001, np.float32), Arena()) for ops in (half, host_ops())
    )
    assert rounded == 1 < exact, "layers of one's own round in half precision, too"
    assert arithmetic_of(device) is HOST and device.arena() is not device.arena()


@pytest.mark.slow
def test_a_run_on_the_cpu_imports_no_kernels():
    code = (
        "import sys, mpitrain.run.loop\n"
        "from mpitrain.ops.device import device_for\n"
        "for compute in ('float32', 'bfloat16'): device_for('cpu', compute=compute)\n"
        "rooms = 'mpitrain.kernels', 'mpitrain.ops.cuda', 'mpitrain.ops.host.compiled'\n"
        "print([name for name in sys.modules if name.startswith(rooms)])"
    )
    done = run([sys.executable, "-c", code])
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.compile
def test_the_kernels_of_a_kind_are_one_set_and_those_that_check_another():
    one, other = device_for("cuda-sim"), device_for("cuda-sim", "library")
    checked = device_for("cuda-sim", checked=True)
    assert one.kernels is other.kernels is not checked.kernels and checked.kernels.engine.checked
    x, y = np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)
    for device in (one, other, checked):
        assert np.all(device.ops.linear(x, y, None, device.arena())[0] == 4)


def test_products_of_tf32_and_of_warpgroups_need_a_gpu_that_has_them(monkeypatch):
    old = SimpleNamespace(engine=SimpleNamespace(capability=75, has_wgmma=False, name="Tesla T4"))
    monkeypatch.setitem(KERNELS, "cuda-sim", lambda: old)
    with pytest.raises(ConfigError, match=r"device\.gemm=3xtf32 needs .* Tesla T4 has none"):
        device_for("cuda-sim", "3xtf32")
    with pytest.raises(ConfigError, match=r"tensor_cores=wgmma needs .* 9\.0, which Tesla T4 has"):
        device_for("cuda-sim", tensor_cores="wgmma")


def test_a_gpu_is_looked_for_once_and_in_one_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    device = device_for("cuda")
    assert isinstance(device.kernels.engine, CudaEngine) and device.kernels.engine.capability == 90
    for array in (device.arena().take((3,), "float32"), device.backend.zeros(3, "float32")):
        assert type(array) is cupy.ndarray
    monkeypatch.setattr(cupy.devices, "count", None)
    for ask in (lambda: device_for("cuda"), KERNELS["cuda"]):
        with pytest.raises(ConfigError, match="needs a GPU and"):
            ask()


def test_only_the_simulator_checks():
    with pytest.raises(ConfigError, match="kernels, but --device"):
        device_for("cpu", checked=True)
