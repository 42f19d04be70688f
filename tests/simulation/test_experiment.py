"""Simulated trials in experiments: the same settings, workloads and tables, marked as what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from experiments.config import ConfigError, TrialSettings, load_experiment
from experiments.runner import run_experiment
from experiments.simulated_backend import SimulatedBackend
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.curve import Curve
from research_engine.simulation.profiled import Profile

BASE = {
    "model": "dummy:tiny", "executor": "simulated", "gpu": "h200", "num_blocks": 200, "max_num_batched_tokens": 256,
    "workload": {"num_requests": 6, "arrivals": {"process": "poisson", "rate": 100},
                 "lengths": {"source": "uniform", "prompt": [8, 64], "output": [4, 16]}},
}  # fmt: skip


def run(directory: Path, **base) -> list[dict]:
    """Summaries of an experiment with these settings, by cell."""
    factors = base.pop("factors", {"scheduler": ["fcfs", "chunked_prefill"]})
    path = directory / "own.yaml"
    path.write_text(yaml.safe_dump({"base": {**BASE, **base}, "factors": factors}))
    experiment, cells = load_experiment(str(path))
    report = run_experiment(experiment, cells, directory / "out", console=Console(quiet=True))
    assert report.failed == {}
    return [json.loads(file.read_text()) for file in sorted((directory / "out" / "trials").glob("*/summary.json"))]


def test_a_simulated_trial_says_so_and_what_it_stood_for(tmp_path):
    for summary in run(tmp_path):
        assert (summary["kind"], summary["machine"]) == ("simulated", "simulated NVIDIA H200, roofline")
        assert summary["metrics"]["num_completed"] == 6


def test_real_and_simulated_trials_share_a_table_and_a_workload(tmp_path):
    levels = [{"label": "real", "set": {"executor": "torch", "device": "cpu"}},
              {"label": "simulated", "set": {"executor": "simulated", "gpu": "h200"}}]  # fmt: skip
    base = {key: value for key, value in BASE.items() if key not in ("executor", "gpu")}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"base": base, "factors": {"on": levels}}))
    experiment, cells = load_experiment(str(path))
    run_experiment(experiment, cells, tmp_path / "out", console=Console(quiet=True))
    summaries = [json.loads(file.read_text()) for file in (tmp_path / "out" / "trials").glob("*/summary.json")]
    assert {summary["kind"] for summary in summaries} == {"real", "simulated"}
    assert len({summary["metrics"]["prompt_tokens"] for summary in summaries}) == 1


def test_a_simulation_repeats_to_the_last_bit(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir()
    assert [s["metrics"] for s in run(first)] == [s["metrics"] for s in run(second)]


def test_without_num_blocks_the_sheet_says_how_much_memory_there_is(tmp_path):
    (summary,) = run(tmp_path, factors={}, model="dummy:llama3-8b", num_blocks=None, gpu="rtx4090", max_num_seqs=64)
    assert 1000 < summary["num_blocks"] < 4000  # 24 GiB less 15 GiB of weights, at 2 MiB a block


def make_profile(path: Path, model: str = "dummy:tiny") -> Path:
    flat = AttentionFormula(0.0, 0.0, 0.0, 0.0, {(1, 0): 0.0})
    Profile(model, {"gpu": "own"}, Curve([(1, 0.5)]), Curve([(0, 0.0)]), flat).save(path)
    return path


def test_a_profile_needs_no_sheet(tmp_path):
    profile = make_profile(tmp_path / "p.json")
    (summary,) = run(tmp_path, factors={}, gpu=None, cost_model=f"profiled:{profile}")
    assert summary["machine"] == "simulated own, profile"
    assert summary["metrics"]["ttft"]["min"] >= 0.5


@pytest.mark.parametrize(
    ("settings", "rule"),
    [({"executor": "torch"}, "gpu, cost_model and tensor_parallel_size describe a simulation"),
     ({"gpu": None}, "needs gpu"),
     ({"gpu": "h20"}, "no GPU sheet 'h20'; there are h200"),
     ({"cost_model": "profiled:no.json"}, "cost_model: .*no.json"),
     ({"cost_model": "guessed"}, "cost_model = 'guessed'"),
     ({"tensor_parallel_size": 3}, "tensor_parallel = 3: must divide the model's num_heads, 4")],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_runs(tmp_path, settings, rule):
    with pytest.raises(ConfigError, match=rule):
        run(tmp_path, factors={}, **settings)


def test_a_profile_of_another_model_or_gpu_is_refused(tmp_path):
    profile = make_profile(tmp_path / "p.json", model="other")
    with pytest.raises(ConfigError, match="model is 'other', wanted 'dummy:tiny'; gpu is 'own', wanted 'NVIDIA H200'"):
        run(tmp_path, factors={}, cost_model=f"profiled:{profile}")
    (summary,) = run(tmp_path, factors={}, cost_model=f"profiled:{profile}", force_profile=True)
    assert summary["machine"] == "simulated own, profile"


@pytest.mark.parametrize(
    ("of_profile", "told", "ahead"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True), (None, None, False)],
)
def test_a_simulation_runs_ahead_as_the_engine_of_its_profile_did_unless_told_otherwise(
    of_profile, told, ahead, tmp_path
):
    source = {"gpu": "h200"}
    if of_profile is not None:
        file = make_profile(tmp_path / "p.json")
        replace(Profile.load(file), overlap=of_profile).save(file)
        source = {"gpu": None, "cost_model": f"profiled:{file}"}
    settings = TrialSettings.model_validate({**BASE, **source, "overlap": told})
    backend = SimulatedBackend(progress=False)
    backend.prepare(settings)
    assert backend.config(settings).overlap is ahead
