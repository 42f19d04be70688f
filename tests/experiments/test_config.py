"""Configurations: what a mistake is told, what key=value words do, how the grid expands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.config import ConfigError, TrialSettings, available, load_experiment
from experiments.plan import trials_of
from research_engine.options import EngineOptions

NEAREST = "no such value; valid ones, nearest first"
EXPERIMENT = """\
description: test
base:
  model: dummy:tiny
  num_blocks: 64
  workload:
    num_requests: 4
    arrivals: {process: poisson, rate: 5}
    lengths: {source: fixed, prompt: 8, output: 4}
factors:
  scheduler: [fcfs, priority]
seeds: [3, 5]
baseline: {scheduler: fcfs}
outputs: {plots: []}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT)
    return path


def mistake(file: Path, old: str = "", new: str = "", *words: str) -> str:
    """What the user is told after a change of the file."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_experiment(str(file), words)
    return str(caught.value)


def test_an_unknown_key_is_named_with_its_line_and_the_nearest(file: Path) -> None:
    told = mistake(file, "num_blocks:", "num_block:")
    assert told.startswith(
        "mine.yaml, line 4: unknown key 'num_block'; valid ones, nearest first: num_blocks, num_host_blocks"
    )


def test_an_unknown_key_deep_inside_is_named_with_its_line(file: Path) -> None:
    told = mistake(file, "prompt: 8", "promt: 8")
    assert "mine.yaml, line 8: unknown key 'promt'; valid ones, nearest first: prompt" in told


def test_an_unknown_top_key_is_named_with_its_line(file: Path) -> None:
    assert "mine.yaml, line 11: unknown key 'seed'; valid ones, nearest first: seeds" in mistake(
        file, "seeds:", "seed:"
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("num_blocks: 64", "num_blocks: -1", "line 4: num_blocks = -1"),
        ("rate: 5", "rate: fast", "line 7: workload.arrivals.rate = 'fast'"),
        ("process: poisson", "process: gamma", "line 7: workload.arrivals: process 'gamma' needs a cv"),
        ("process: poisson", "process: poison", f"line 7: workload.arrivals.process = 'poison': {NEAREST}: poisson"),
        ("source: fixed", "source: fix", f"line 8: workload.lengths.source = 'fix': {NEAREST}: fixed"),
        ("[fcfs, priority]", "[fcfs, prio]", "line 10: no scheduler 'prio'; valid ones, nearest first: priority"),
        ("[fcfs, priority]", "[fcfs, fcfs]", "line 10: factors.scheduler: two levels are alike in fcfs, fcfs"),
        ("[fcfs, priority]", "fcfs", "line 10: factors.scheduler: a factor needs a list of levels"),
        ("seeds: [3, 5]", "seeds: [3, 3]", "line 11: seeds: [3, 3] must be distinct"),
        ("seeds: [3, 5]", f"seeds: [{2**63}]", f"line 11: seeds: [{2**63}] must be distinct integers >= 0 and < 2^63"),
        ("{scheduler: fcfs}", "{scheduler: fcsf}", "line 12: baseline: scheduler has no level 'fcsf'; valid ones"),
        ("{scheduler: fcfs}", "{schedule: fcfs}", "line 12: baseline: no factor 'schedule'; valid ones"),
        ("num_blocks: 64", "num_blocks: [", "no YAML"),
        ("num_blocks: 64", "model: other", "line 4: the key 'model' is there twice, first in mine.yaml, line 3"),
    ],
)
def test_a_mistake_is_told_with_place_value_and_rule(file: Path, old: str, new: str, told: str) -> None:
    assert told in mistake(file, old, new)


def test_an_impossible_level_is_told_with_the_factors_line(file: Path) -> None:
    told = mistake(file, "scheduler: [fcfs, priority]", "scheduler: [fcfs]\n  block_size: [16, 0]")
    assert "mine.yaml, line 11: block_size = 0" in told


def test_a_mistake_on_the_command_line_is_told_as_typed(file: Path) -> None:
    told = mistake(file, "", "", "workload.lengths.promt=9")
    assert told.startswith(
        "command line, workload.lengths.promt=9: unknown key 'promt'; valid ones, nearest first: prompt"
    )
    assert mistake(file, "", "", "nonsense") == "'nonsense': expected key=value, such as workload.arrivals.rate=2"


def test_a_rule_about_several_keys_is_told_with_the_place_of_the_one_at_fault(file: Path) -> None:
    told = mistake(file, "", "", "max_num_batched_tokens=64", "scheduler_params.token_budget=99")
    assert told.startswith(
        "command line, scheduler_params.token_budget=99: scheduler_params.token_budget = 99 is above"
    )
    levels = "scheduler_params.token_budget: [32, 99]"
    told = mistake(file, "scheduler: [fcfs, priority]", f"{levels}\n  scheduler: [fcfs]", "max_num_batched_tokens=64")
    assert told.startswith("mine.yaml, line 10: scheduler_params.token_budget = 99 is above")


def test_swapping_without_host_blocks_is_refused_before_anything_runs(file: Path) -> None:
    words = ("baseline={}", "factors.scheduler_params.preemption=[recompute, swap]")
    assert mistake(file, "", "", *words).endswith(
        "fcfs, swap: preemption = 'swap' needs host blocks: set swap_space (GiB) or num_host_blocks"
    )
    assert load_experiment(str(file), [*words, "num_host_blocks=8"])


def test_a_parameter_that_the_policy_lacks_is_told(file: Path) -> None:
    told = mistake(file, "", "", "scheduler=priority", "scheduler_params.agein=3")
    assert "command line, scheduler_params.agein=3" in told
    assert "nearest first: ageing" in told


def test_unknown_experiments_and_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment 'quikstart'; valid ones, nearest first: quickstart"):
        load_experiment("quikstart")
    with pytest.raises(ConfigError, match="no file 'missing.yaml'"):
        load_experiment("missing.yaml")


def test_the_grid_is_full_and_every_cell_gets_every_seed(file: Path) -> None:
    experiment, cells = load_experiment(str(file), ["factors.block_size=[8, 16, 32]"])
    trials = trials_of(experiment, cells)
    assert [cell.label for cell in cells] == [f"{s}, {b}" for s in ("fcfs", "priority") for b in (8, 16, 32)]
    assert len({trial.key for trial in trials}) == len(trials) == 12
    assert [trial.seed for trial in trials] == [3] * 6 + [5] * 6


def test_a_level_may_set_several_keys_together(file: Path) -> None:
    levels = (
        "[{label: small, set: {block_size: 8, num_blocks: 128}}, {label: large, set: {block_size: 32, num_blocks: 32}}]"
    )
    _, cells = load_experiment(str(file), ["scheduler=[fcfs]", f"factors.blocks={levels}"])
    assert [(c.label, c.settings.block_size, c.settings.num_blocks) for c in cells] == [
        ("fcfs, small", 8, 128),
        ("fcfs, large", 32, 32),
    ]


def test_one_value_for_a_factor_replaces_its_levels_and_a_lost_baseline(file: Path) -> None:
    experiment, cells = load_experiment(str(file), ["scheduler=chunked_prefill", "seeds=7"])
    assert [cell.settings.scheduler for cell in cells] == ["chunked_prefill"]
    assert experiment.baseline == {}
    assert experiment.seeds == (7,)


def test_a_policy_from_a_file_is_named_by_its_class(file: Path, tmp_path: Path) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("from schedulers.fcfs import FCFS\nclass Mine(FCFS):\n    pass\n")
    experiment, cells = load_experiment(str(file), [f"scheduler=[fcfs, {policy}:Mine]"])
    assert [cell.label for cell in cells] == ["fcfs", "Mine"]
    before = trials_of(experiment, cells)[1].key
    policy.write_text(policy.read_text() + "\n# changed\n")
    assert trials_of(experiment, cells)[1].key != before


def test_a_policys_package_is_part_of_its_trials_key(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policies_under_study"
    folder.mkdir()
    mine = "from .rules import *\nfrom schedulers.fcfs import FCFS\n"
    for name, text in {"__init__": "", "rules": "", "mine": mine}.items():
        (folder / f"{name}.py").write_text(text)
    experiment, cells = load_experiment(str(file), [f"scheduler={folder / 'mine.py'}:FCFS"])
    before = trials_of(experiment, cells)[0].key
    (folder / "rules.py").write_text("WEIGHT = 2\n")
    assert trials_of(experiment, cells)[0].key != before


def test_every_setting_changes_the_trials_key(file: Path) -> None:
    def key(*words: str) -> str:
        experiment, cells = load_experiment(str(file), ["scheduler=fcfs", "seeds=1", *words])
        return trials_of(experiment, cells)[0].key

    keys = [
        key(),
        key("num_blocks=65"),
        key("workload.arrivals.rate=6"),
        key("scheduler_params.watermark=0.5"),
        key("seeds=2"),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_every_engine_option_is_a_setting() -> None:
    given_by_the_trial = {"seed", "skip_tokenizer_init", "check_integrity"} | {
        "task",
        "runner",
        "pooling",
        "quantization",
    }  # it generates, and takes the weights as the model it names has them
    assert {entry.name for entry in fields(EngineOptions)} - given_by_the_trial <= set(TrialSettings.model_fields)


@pytest.mark.parametrize("name", sorted(available()))
def test_what_ships_is_valid_and_described(name: str) -> None:
    experiment, cells = load_experiment(name)
    assert experiment.description
    assert cells
    assert yaml.safe_load(available()[name].read_text())["baseline"]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["model=dummy:tiny", "scheduler=[fcfs,vtc]"], "texts; changed: model=dummy:tiny scheduler=[fcfs,vtc]"),
        (["seeds=[4]", "explain=true", "num_blocks=70"], "texts; changed: num_blocks=70"),
        (["seeds=[4]", "outputs.plots=[]"], "texts"),
        (["num_blocks=70", "description=mine"], "mine"),
    ],
)
def test_a_description_says_what_the_command_line_changed(words: list[str], end: str) -> None:
    assert load_experiment("quickstart", words)[0].description.endswith(end)


@pytest.mark.parametrize("name", ["papers/sarathi_table_4", "papers/pagedattention_fig_19b"])
def test_what_ships_is_found_from_any_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These two name a policy and a GPU sheet that ship with them."""
    monkeypatch.chdir(tmp_path)
    settings = [cell.settings for cell in load_experiment(name)[1]]
    named = [one.scheduler.rpartition(":")[0] for one in settings] + [one.gpu or "" for one in settings]
    files = [Path(file) for file in named if file.endswith((".py", ".json"))]
    assert files and all(file.is_file() for file in files)


@pytest.mark.parametrize(("stem", "name"), [("mine", "mine"), ("my été 2", "my-t-2"), ("实验", "experiment")])
def test_an_experiment_without_a_name_takes_one_from_its_file(stem: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text("base: {model: 'dummy:tiny'}\n")
    assert load_experiment(str(path))[0].name == name


def load(**base: Any) -> TrialSettings:
    """Settings of a trial on the stub backend."""
    return TrialSettings.model_validate({"model": "dummy:tiny", "num_blocks": 64, **base})
