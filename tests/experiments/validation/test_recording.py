"""Recordings: what was recorded comes back, and what is none is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.validation.recording import Recording
from tests.experiments.validation.runs import recording


def test_a_recording_survives_its_files(tmp_path):
    own = replace(recording(), capacities={"fcfs": 21.0, "sjf": 20.0})
    own.save(tmp_path / "r")
    read = Recording.load(tmp_path / "r")
    assert (read.model, read.machine, read.engine, read.capacity) == (own.model, own.machine, own.engine, own.capacity)
    assert read.capacities == own.capacities
    for again, run in zip(read.runs, own.runs, strict=True):
        assert (again.scheduler, again.load, again.rate, again.disturbed) == (run.scheduler, run.load, run.rate, 0.0)
        assert [step.work for step in again.steps] == [step.work for step in run.steps]
        for name in ("started", "committed", "executed", "finished"):  # in files of tenths of a microsecond
            times = [[getattr(step, name) for step in own.steps] for own in (again, run)]
            assert times[0] == pytest.approx(times[1], abs=6e-8)
        assert [replace(a, time=0.0) for a in again.arrivals] == [replace(a, time=0.0) for a in run.arrivals]
        assert [a.time for a in again.arrivals] == pytest.approx([a.time for a in run.arrivals], abs=6e-8)
        ends = [[r.last_token_time for r in own.requests] for own in (again, run)]
        assert ends[0] == pytest.approx(ends[1], abs=6e-8)


def test_a_recording_of_before_the_capacities_is_read(tmp_path):
    recording().save(tmp_path)
    head = json.loads((tmp_path / "recording.json").read_text())
    del head["capacities"]
    (tmp_path / "recording.json").write_text(json.dumps(head))
    assert Recording.load(tmp_path).capacities == {}


def test_times_count_from_the_runs_start():
    late, early = recording(start=1000.0).runs[0], recording().runs[0]
    assert [a.time for a in late.arrivals] == pytest.approx([a.time for a in early.arrivals])
    assert late.end == pytest.approx(early.end)


def test_what_is_no_recording_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="none: no recording"):
        Recording.load(tmp_path / "none")
    own = recording()
    own.save(tmp_path / "r")
    head = json.loads((tmp_path / "r" / "recording.json").read_text())
    wrong_engine = {**head, "engine": {"num_blocks": -1, "eos_token_ids": []}}
    for changed, rule in (({**head, "format": 9}, "format 9, this version reads 2"), ({"format": 2}, "lacks"),
                          (wrong_engine, "num_blocks = -1")):  # fmt: skip
        (tmp_path / "r" / "recording.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rule):
            Recording.load(tmp_path / "r")
    (tmp_path / "r" / "recording.json").write_text(json.dumps(head))
    (tmp_path / "r" / "steps.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match="r: no recording"):
        Recording.load(tmp_path / "r")
