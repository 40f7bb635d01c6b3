"""Meters of energy and of the state of GPUs: what they read, what they leave out, and what a run and a report make of them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.config import parse, with_settings
from mpitrain.machine import meters
from mpitrain.machine.meters import Energy, Meter, energy_here, energy_of, gpu_states
from mpitrain.run.build import build
from mpitrain.tools.bench.table import KEPT, table, with_energy
from mpitrain.tools.bench.training.steps import Ours, alternate
from mpitrain.tools.doctor.probes import Values, faulty_gpus, line_states
from mpitrain.tools.report.text import energy
from mpitrain.transport.threads import run_ranks
from tests.runs import TINY, go, records


class NVMLError(Exception):
    def __init__(self, words, value=3):
        super().__init__(words)
        self.value = value


class Nvml:
    """The driver's library with two GPUs; the second has neither ECC nor NVLink, and no meter."""

    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_CLOCK_SM = NVML_VOLATILE_ECC = NVML_NVLINK_ERROR_DL_REPLAY = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_NVLINK_MAX_LINKS = 1, 18
    addresses = "0000:17:00.0", "0000:18:00.0"
    millijoules = 5000

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByPciBusId(self, address):
        return self.addresses.index(address)

    def _of_first(self, handle, value):
        if handle:
            raise NVMLError("Not Supported")
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._of_first(handle, self.millijoules)

    def nvmlDeviceGetPcieReplayCounter(self, handle):
        return 3

    def nvmlDeviceGetNvLinkErrorCounter(self, handle, link, counter):
        return self._of_first(handle or link > 1, 20)

    def nvmlDeviceGetClockInfo(self, handle, which):
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle, which):
        return 1980

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, since):
        return self._of_first(handle, 4)


@pytest.fixture
def nvml(monkeypatch):
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def zone(folder, place, name, joules, most=262.0):
    (folder / place).mkdir(parents=True)
    for key, value in (("energy_uj", joules * 1e6), ("max_energy_range_uj", most * 1e6)):
        (folder / place / key).write_text(f"{value:.0f}\n")
    (folder / place / "name").write_text(f"{name}\n")


def test_the_packages_of_processors_are_counted_and_no_part_of_them_twice(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)
    zone(tmp_path, "intel-rapl:1", "package-1", 260)
    found = energy_here(powercap=tmp_path)
    assert [*found.parts] == ["package-0", "package-1"]
    for place, joules in (("intel-rapl:0", 11.5), ("intel-rapl:1", 3)):  # the second begins again
        (tmp_path / place / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    assert found.since() == pytest.approx(1.5 + 5)
    assert found.since() == 0


def test_without_a_meter_that_may_be_read_there_is_none(tmp_path, monkeypatch):
    assert energy_here(powercap=tmp_path) is None
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0/name").write_text("package-0\n")  # energy_uj is root's
    assert energy_here(powercap=tmp_path) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert energy_here(["0000:17:00.0"], tmp_path) is None and gpu_states() == []


def test_a_gpu_of_several_ranks_is_counted_once_and_one_without_a_meter_makes_no_half_sum(
    nvml, tmp_path
):
    first, second = nvml.addresses
    found = energy_here([first, first], tmp_path)
    nvml.millijoules += 2500
    assert [*found.parts] == [f"GPU {first}"] and found.since() == pytest.approx(2.5)
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    assert energy_here([first, second], tmp_path) is None


def test_the_state_of_gpus_has_clocks_and_errors_and_says_what_is_unknown(nvml):
    first, second = gpu_states()
    assert first == ("GPU 0", 1410, 1980, 4, 3 + 2 * 20, "")
    assert second == ("GPU 1", 1410, 1980, None, 3, "")


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetClockInfo", "nvmlDeviceGetCount"]
)
def test_a_lost_gpu_is_a_state_that_the_doctor_names(nvml, monkeypatch, function):
    answer = getattr(nvml, function)

    def lost(*words):
        if words and not words[0]:
            return answer(*words)
        raise NVMLError("GPU is lost", nvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(nvml, function, lost)
    states = gpu_states()
    name = "every GPU" if function == "nvmlDeviceGetCount" else "GPU 1"
    assert states[-1] == (name, None, None, None, None, "GPU is lost")
    assert [state.problem for state in states[:-1]] == [""] * (len(states) - 1)
    seen = Values(["a"], [states])
    assert f"{name} of a: cannot be asked" in line_states(seen)
    assert faulty_gpus("a", [states], seen).endswith(f"{name} of a cannot be asked: GPU is lost")


@pytest.mark.parametrize("read", ["", "none"])
def test_after_a_meter_has_failed_once_there_is_no_energy(tmp_path, read):
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    found, file = energy_here(powercap=tmp_path), tmp_path / "intel-rapl:0/energy_uj"
    file.write_text(read) if read else file.unlink()
    assert found.since() is None
    file.write_text("12000000\n")
    assert found.since() is None and found.since() is None


def test_a_gpu_whose_meter_fails_or_is_set_back_has_no_energy(nvml, monkeypatch, tmp_path):
    first, _ = nvml.addresses
    found, lost = energy_here([first], tmp_path), energy_here([first], tmp_path)
    nvml.millijoules -= 1
    assert found.since() is None and found.since() is None

    def fails(handle):
        raise NVMLError("GPU is lost", nvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(nvml, "nvmlDeviceGetTotalEnergyConsumption", fails)
    assert lost.since() is None


def test_ranks_of_several_hosts_have_no_energy(tmp_path, monkeypatch):
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    monkeypatch.setattr(meters, "energy_here", lambda gpus: energy_here(gpus, tmp_path))
    assert [*energy_of([("a", "", "")] * 2).parts] == ["package-0"]
    assert energy_of([("a", "", ""), ("b", "", "")]) is None
    (line,) = energy([{"event": "start", "hosts": 2}, {"step": 1}])
    assert "one of 2" in line
    assert [*energy([{"event": "start", "hosts": 1}, {"step": 1}])] == []


@pytest.fixture
def counting(monkeypatch):
    """A meter that counts 6 J at each reading, up to `most`, and then fails."""
    read = SimpleNamespace(joules=0.0, most=1e9)

    def count():
        read.joules += 6
        if read.joules > read.most:
            raise OSError("no data")
        return read.joules

    monkeypatch.setattr(
        meters,
        "energy_here",
        lambda gpus: Energy({"package-0": Meter(count)}) if not [*gpus] else 0,
    )
    return read


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text("some words to train on. " * 40)
    return f"data.source=text:{tmp_path / 'book.txt'}"


def test_a_comparison_has_the_energy_of_a_token_where_there_is_a_meter(counting, book):
    """Six joules are those of a turn of 3 steps of 6 x 8 tokens."""
    config = parse(with_settings({}, [*TINY, book]))

    def compared(transport):
        job = build(transport, config)
        rows = alternate(transport, job, [Ours(job)], 2, 3)
        job.close()
        return rows

    (row,), (of_rank_1,) = run_ranks(2, compared)
    assert row.joules == 2 and of_rank_1.joules is None
    heading, line = table(with_energy(KEPT, [row]), ["mpitrain"]).lines([row])
    assert " J/token exposed ms" in heading and line.split()[-4] == f"{2 / 48:.3g}"
    assert with_energy(KEPT, [of_rank_1]) == KEPT


def test_a_run_records_the_energy_of_its_tokens_and_a_report_says_it(tmp_path, counting, book):
    """The six joules are those of a step of 6 rows."""
    go(2, [*TINY, book, f"run.out={tmp_path / 'run'}"])
    found = records(tmp_path)
    assert found[0]["metered"] == ["package-0"]
    each = [record["joules_per_token"] for record in found if "lr" in record]
    assert np.allclose(each, 1 / 8) and len(each) == 6
    (line,) = energy(found)
    assert line.startswith("Energy: 0.125 J a token (package-0")


def test_a_meter_that_fails_does_not_end_a_run_or_a_comparison(tmp_path, counting, book):
    counting.most = 4 * 6.0  # when the energy is made, at the start line, and for two steps
    go(1, [*TINY, book, f"run.out={tmp_path / 'run'}"])
    steps = [record for record in records(tmp_path) if "lr" in record]
    assert ["joules_per_token" in record for record in steps] == [True] * 2 + [False] * 4
    counting.most = counting.joules + 4 * 6.0  # of two turns the first

    def compared(transport):
        job = build(transport, parse(with_settings({}, [*TINY, book])))
        rows = alternate(transport, job, [Ours(job)], 2, 3)
        job.close()
        return rows

    ((row,),) = run_ranks(1, compared)
    assert row.joules is None and len(row.losses) == 6
