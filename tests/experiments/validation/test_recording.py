"""Recordings: what was recorded comes back, and what is none is refused by name."""

from __future__ import annotations

import json

import pytest

from experiments.validation.recording import Recording
from tests.experiments.validation.runs import recording


def test_a_recording_survives_its_files(tmp_path):
    own = recording()
    own.save(tmp_path / "r")
    read = Recording.load(tmp_path / "r")
    assert (read.model, read.machine, read.engine, read.capacity) == (own.model, own.machine, own.engine, own.capacity)
    for again, run in zip(read.runs, own.runs, strict=True):
        assert (again.scheduler, again.load, again.rate, again.disturbed) == (run.scheduler, run.load, run.rate, 0.0)
        assert again.steps == run.steps
        assert again.arrivals == run.arrivals
        assert [r.last_token_time for r in again.requests] == [r.last_token_time for r in run.requests]


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
    for changed, rule in (({**head, "format": 9}, "format 9, this version reads 1"), ({"format": 1}, "lacks"),
                          (wrong_engine, "num_blocks = -1")):  # fmt: skip
        (tmp_path / "r" / "recording.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=rule):
            Recording.load(tmp_path / "r")
    (tmp_path / "r" / "recording.json").write_text(json.dumps(head))
    (tmp_path / "r" / "steps.parquet").write_bytes(b"junk")
    with pytest.raises(ValueError, match="r: no recording"):
        Recording.load(tmp_path / "r")
