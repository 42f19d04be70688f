"""The whole command on a small model on a CPU: it runs, and its recording can be compared again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validation.command import ValidateOptions, main
from experiments.validation.recording import Recording
from research_engine.cli import main as cli
from tests.experiments.validation.runs import PROFILE

SMALL = {"device": "cpu", "requests": 8, "max_prompt": 100, "max_output": 60, "max_num_seqs": 4, "num_blocks": 80,
         "max_num_batched_tokens": 64, "schedulers": ("fcfs", "sjf")}  # fmt: skip


def test_real_and_simulated_serve_the_same_requests(tmp_path, capsys):
    pytest.importorskip("torch")
    replace(PROFILE, model="dummy:tiny").save(tmp_path / "p.json")
    options = ValidateOptions("dummy:tiny", tmp_path / "p.json", force=True, out=tmp_path / "out", **SMALL)
    assert main(options) == 0
    recording = Recording.load(tmp_path / "out")
    assert [(run.load, run.scheduler) for run in recording.runs] == [
        (load, policy) for load in (0.5, 0.8, 0.95) for policy in ("fcfs", "sjf")
    ]
    assert set(recording.capacities) == {"fcfs", "sjf"}
    assert recording.capacity == min(recording.capacities.values())
    for run in recording.runs:
        assert run.rate == run.load * recording.capacity
        assert len(run.requests) == 8
        assert sum(step.work.draws for step in run.steps) == sum(r.output_tokens for r in run.requests)
    assert capsys.readouterr().out.count("| sjf |") == 3


def test_a_profile_of_another_machine_is_refused_with_the_differences(tmp_path, capsys):
    pytest.importorskip("torch")
    replace(PROFILE, model="dummy:tiny").save(tmp_path / "p.json")
    words = ["validate", "dummy:tiny", "--profile", str(tmp_path / "p.json"), "--device", "cpu", "--out", str(tmp_path)]
    assert cli(words) == 2
    told = capsys.readouterr().err
    assert "gpu is 'planted', wanted" in told
    assert "kernels is 'not recorded', wanted" in told


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["--loads", "0.5", "0.9"], "must be three different shares"),
     (["--schedulers", "sjf", "sjf"], "different policies"),
     (["--requests", "3"], "requests = 3"), ([], "No such file"), (["--schedulers", "fcsf"], "No such file")],
)  # fmt: skip
def test_a_users_mistake_ends_with_code_2(words, rule, tmp_path, capsys):
    assert cli(["validate", "dummy:tiny", "--profile", str(tmp_path / "none.json"), *words]) == 2
    assert rule in capsys.readouterr().err


def test_a_profile_of_another_model_is_refused(tmp_path, capsys):
    PROFILE.save(tmp_path / "p.json")
    assert cli(["validate", "dummy:tiny", "--profile", str(tmp_path / "p.json")]) == 2
    assert "model is 'm', wanted 'dummy:tiny'" in capsys.readouterr().err
