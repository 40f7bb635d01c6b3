"""Meters of energy and of the state of GPUs: what they read, what they leave out, and what a run and a report make of them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain.machine import meters
from mpitrain.machine.meters import Energy, Meter, energy_here, gpu_states
from mpitrain.run import loop
from mpitrain.tools.report.text import energy
from tests.runs import TINY, go, records


class NVMLError(Exception):
    pass


class Nvml:
    """The driver's library with two GPUs; the second has neither ECC nor NVLink, and no meter."""

    NVMLError = NVMLError
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
    assert first == ("GPU 0", 1410, 1980, 4, 3 + 2 * 20)
    assert second == ("GPU 1", 1410, 1980, None, 3)


def test_a_run_records_the_energy_of_its_tokens_and_a_report_says_it(tmp_path, monkeypatch):
    """A meter that counts 6 J at each reading: those of a step of 6 rows."""
    read = SimpleNamespace(joules=0.0)

    def count():
        read.joules += 6
        return read.joules

    monkeypatch.setattr(
        loop, "energy_here", lambda gpus: Energy({"package-0": Meter(count)}) if not [*gpus] else 0
    )
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    (tmp_path / "book.txt").write_text("some words to train on. " * 40)
    go(2, [*TINY, f"data.source=text:{tmp_path / 'book.txt'}", f"run.out={tmp_path / 'run'}"])
    found = records(tmp_path)
    assert found[0]["metered"] == ["package-0"]
    each = [record["joules_per_token"] for record in found if "lr" in record]
    assert np.allclose(each, 1 / 8) and len(each) == 6
    (line,) = energy(found)
    assert line.startswith("Energy: 0.125 J a token (package-0")
