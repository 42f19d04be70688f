"""What others take of a machine, by readings that the tests hand out."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from research_engine import other_load
from research_engine.other_load import CoreWatch, gpu_load

STAT = "cpu  9 9 9 9\ncpu0 {user} 0 100 5000 7 0 0 {stolen}\ncpu1 300 0 0 5000 0 0 0 0\ncpu9 {user} 0 0 0 0 0 0 0\n"


@pytest.fixture
def reads(monkeypatch, tmp_path):
    """Two cores, readings of the system's counters one after the other, and a clock."""

    def give(*readings: tuple[float, float | None, float]) -> None:
        walls, busy, own = (iter(column) for column in zip(*readings, strict=True))
        monkeypatch.setattr(other_load, "time", SimpleNamespace(perf_counter=walls.__next__))
        monkeypatch.setattr(other_load, "_busy_seconds", busy.__next__)
        monkeypatch.setattr(other_load, "_own_seconds", own.__next__)
        monkeypatch.setattr(other_load, "usable_cores", lambda: 2)

    return give


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [(20.0, 12.0, 0.4), (12.0, 12.0, 0.0), (11.9, 12.0, 0.0), (40.0, 0.0, 1.0)],
    ids=["somebody else", "this process alone", "ticks of the counter", "all of it"],
)
def test_what_others_take_is_what_this_process_does_not(busy, own, share, reads):
    reads((0.0, 100.0, 50.0), (10.0, 100.0 + busy, 50.0 + own))
    assert CoreWatch().others() == pytest.approx(share)


def test_a_system_that_does_not_tell_gives_none(reads):
    reads((0.0, None, 0.0), (10.0, None, 1.0))
    assert CoreWatch().others() is None


def test_busy_is_all_but_idle_and_waiting_on_the_cores_this_process_may_use(monkeypatch, tmp_path):
    path = tmp_path / "stat"
    path.write_text(STAT.format(user=500, stolen=40))
    monkeypatch.setattr(other_load, "Path", lambda name: path)
    monkeypatch.setattr(other_load.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(other_load.os, "sysconf", lambda name: 100)
    assert other_load._busy_seconds() == pytest.approx((500 + 100 + 40 + 300) / 100)


class Nvml:
    """The driver's library as far as `gpu_load` asks it."""

    def __init__(self, percent: int, status: int = 0) -> None:
        self.percent, self.status = percent, status

    def nvmlDeviceGetUtilizationRates(self, device: object, found: object) -> int:
        rates = ctypes.cast(found, ctypes.POINTER(ctypes.c_uint))
        rates[0], rates[1] = self.percent, 99
        return self.status


@pytest.mark.parametrize(("nvml", "load"), [(Nvml(37), 0.37), (Nvml(0), 0.0), (Nvml(37, status=3), None), (None, None)])
def test_a_gpus_load_is_what_its_driver_tells(nvml, load, monkeypatch):
    given = None if nvml is None else (nvml, ctypes.c_void_p())
    monkeypatch.setattr("research_engine.bench.device_energy.nvml_device", lambda index: given)
    assert gpu_load(0) == load
