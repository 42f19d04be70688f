"""The grid, its conditions, seeds, repeats and order; what is refused before anything runs; what running costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config import ConfigError, load_experiment
from experiments.plan import trials_of
from experiments.run import main
from experiments.trial import warm_up
from experiments.workloads import build_workload
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_config import EXPERIMENT, load, mistake
from tests.experiments.test_launchers import SIMULATED


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT)
    return path


def labels(file: Path, *words: str) -> list[str]:
    return [cell.label for cell in load_experiment(str(file), words)[1]]


def test_paired_factors_go_level_by_level(file: Path) -> None:
    words = ["factors.block_size=[8, 16]", "factors.num_blocks=[128, 64]"]
    assert labels(file, "grid=paired", *words) == ["fcfs, 8, 128", "priority, 16, 64"]
    assert len(labels(file, *words)) == 8


def test_paired_factors_of_unequal_length_are_refused(file: Path) -> None:
    told = mistake(file, "", "", "grid=paired", "factors.block_size=[8, 16, 32]")
    assert told.startswith(
        "command line, grid=paired: grid: paired factors need as many levels each: scheduler 2, block"
    )


def test_conditions_choose_cells(file: Path) -> None:
    words = ["factors.block_size=[8, 16, 32]"]
    assert labels(file, *words, "exclude=[{scheduler: fcfs, block_size: [8, 32]}]") == [
        "fcfs, 16", "priority, 8", "priority, 16", "priority, 32"]  # fmt: skip
    assert labels(file, *words, "include=[{scheduler: priority}, {block_size: 8}]", "exclude=[{block_size: 32}]") == [
        "fcfs, 8", "priority, 8", "priority, 16"]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("exclude=[{schedular: fcfs}]", "exclude: no factor 'schedular'; valid ones, nearest first: scheduler"),
        ("include=[{scheduler: fcsf}]", "include: scheduler has no level 'fcsf'; valid ones, nearest first: fcfs"),
        ("exclude={scheduler: fcfs}", "exclude: must be a list of conditions"),
        ("exclude=[{scheduler: [fcfs, priority]}]", "include and exclude leave no cell of the grid"),
        ("scheduler_params.token_budget=4096", "token_budget = 4096 is above max_num_batched_tokens = 512"),
        ("workload.num_requests=99999999999999", "workload.num_requests = 99999999999999: Input should be less than"),
        (
            "outputs.plots=[bars, {kind: latency_load, x: schedular}]",
            "outputs: plots.1.x: no factor 'schedular'; valid ones, nearest first: scheduler",
        ),
        ("outputs.plots=[latency_cfd]", "no such value; valid ones, nearest first: latency_cdf"),
        ("outputs.plots=[{kind: pareto, x: scheduler}]", "pareto takes no x"),
        ("outputs.table=[ttft_p98]", "no metric 'ttft_p98'; valid ones, nearest first: ttft_p9"),
    ],
)
def test_a_mistake_in_the_design_is_told(file: Path, word: str, told: str) -> None:
    assert told in mistake(file, "", "", "max_num_batched_tokens=512", word)


def test_a_chunk_above_the_budget_that_a_simulation_has_by_itself_is_refused(file: Path) -> None:
    words = ("executor=simulated", "gpu=h200", "scheduler=chunked_prefill")
    told = mistake(file, "", "", *words, "scheduler_params.token_budget=8193")
    assert "token_budget = 8193 is above max_num_batched_tokens = 8192: no step could hold such a chunk" in told
    load_experiment(str(file), [*words, "scheduler_params.token_budget=8192"])


@pytest.mark.parametrize(
    ("label", "begins"),
    [
        ("a/../b, 3", "a-..-b-3-seed3-"),
        ("..", "cell-seed3-"),
        ("план", "план-seed3-"),
        ("長" * 300, "長" * 48 + "-seed3-"),
    ],
)
def test_a_trials_directory_is_in_sight_and_short_whatever_its_cell_is_called(
    file: Path, label: str, begins: str
) -> None:
    trial = trials_of(*load_experiment(str(file), ["scheduler=[fcfs]"]))[0]
    name = replace(trial, cell=label).directory_name
    assert name.startswith(begins)
    assert len(name.encode()) < 240 and "/" not in name


def test_cells_run_in_another_order_under_every_seed_and_always_the_same_one(file: Path) -> None:
    def order(*words: str) -> list[list[str]]:
        experiment, cells = load_experiment(str(file), ["seeds=[0,1,2,3]", "factors.block_size=[4,8,16,32]", *words])
        trials = trials_of(experiment, cells)
        return [[trial.cell for trial in trials if trial.seed == seed] for seed in range(4)]

    random, written = order(), order("order=as_written")
    assert random == order()
    assert len({tuple(cells) for cells in random}) > 1
    assert [sorted(cells) for cells in random] == [sorted(cells) for cells in written]
    assert len({tuple(cells) for cells in written}) == 1


def test_repeats_are_trials_of_their_own_after_every_seed_has_run(file: Path) -> None:
    experiment, cells = load_experiment(str(file), ["repeats=2"])
    trials = trials_of(experiment, cells)
    assert [(trial.repeat, trial.seed) for trial in trials] == [(0, 3)] * 2 + [(0, 5)] * 2 + [(1, 3)] * 2 + [(1, 5)] * 2
    assert len({trial.key for trial in trials}) == len({trial.directory_name for trial in trials}) == 8


def test_a_workloads_file_is_part_of_the_trials_key(file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    words = ["scheduler=fcfs", f"workload.lengths={{source: file, path: {trace}}}"]

    def key(rows: str) -> str:
        trace.write_text("prompt_tokens,output_tokens\n" + rows)
        return trials_of(*load_experiment(str(file), words))[0].key

    assert key("9,9\n") != key("10,9\n")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("model=dummy:tinny", "unknown model 'dummy:tinny'"),
        ("model=./gone", "no such file or directory"),
        ("gpu=h20", "h200"),
        ("workload.lengths={source: file, path: gone.csv}", "no file 'gone.csv'"),
    ],
)
def test_a_dry_run_refuses_what_is_not_there(
    word: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SIMULATED)
    assert main([str(path), "--dry-run", word]) == 2
    assert told in capsys.readouterr().err


def test_a_dry_run_finds_a_missing_device_and_says_what_it_does_not_look_for(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([str(file), "--dry-run", "device=cuda"]) == 2
    assert "device = 'cuda': torch finds 0 CUDA devices" in capsys.readouterr().err
    assert main(["kernel_variants", "--dry-run"]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err
    assert main([str(file), "--dry-run", "device=cuda", "--slurm"]) == 0
    assert "its first trial): the devices of the nodes; whether every request fits" in capsys.readouterr().out
    assert main([str(file), "--dry-run", "model=no-such-owner/no-such-model"]) == 0
    assert "whether no-such-owner/no-such-model can be had, since nothing is downloaded" in capsys.readouterr().out
    assert main([str(file), "--dry-run", "executor=simulated", "gpu=h200", "model=no-such-owner/none"]) == 0
    assert main([str(file), "--dry-run", "model=./gone"]) == 2


def test_a_dry_run_of_a_simulation_estimates_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(SIMULATED)
    assert main([str(path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("to run    ") and lines[0].endswith("s (of real time, by its first 32 requests)")
    assert lines[-1].startswith("4 of 4 trials to run, ")


def test_a_place_to_run_in_that_contradicts_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "model=dummy:tiny", "--ray", "--slurm"]) == 2
    assert "give one place to run in" in capsys.readouterr().err


class RealStub(StubBackend):
    kind = "real"


def test_the_warm_up_runs_as_many_requests_at_once_as_the_run_does() -> None:
    seen: list[int] = []

    class Watched(RealStub):
        def engine(self, settings: object, seed: int) -> object:  # type: ignore[override]
            engine = super().engine(settings, seed)  # type: ignore[arg-type]
            execute = engine.executor.execute

            def watched(batch: object) -> object:
                seen.append(len(batch.rows))  # type: ignore[attr-defined]
                return execute(batch)  # type: ignore[arg-type]

            engine.executor.execute = watched  # type: ignore[method-assign, assignment]
            return engine

    settings = load(max_num_seqs=6, workload={"num_requests": 20, "arrivals": {"process": "poisson", "rate": 0.01},
                                              "lengths": {"source": "fixed", "prompt": 8, "output": 50}})  # fmt: skip
    workload = build_workload(settings.workload, 0, vocab_size=100)
    warm_up(settings, workload, Watched())
    assert max(seen) == 6
    assert len(seen) < 50  # a few output tokens, not all
    seen.clear()
    warm_up(settings.model_copy(update={"warmup_requests": 0}), workload, Watched())
    assert seen == []


def test_a_closed_loop_is_labelled_in_the_table(tmp_path: Path) -> None:
    from tests.experiments.test_launchers import run

    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT)
    run(path, tmp_path / "run", "workload.arrivals={process: closed_loop, concurrency: 2}", backend=StubBackend())
    assert "| load | closed loop, 2 at once | closed loop, 2 at once |" in (tmp_path / "run" / "table.md").read_text()


def test_a_cell_starts_with_an_empty_prefix_cache(tmp_path: Path) -> None:
    """The same requests under two seeds' worth of cells: none finds what another cell left."""
    import pandas as pd

    from tests.experiments.test_launchers import run

    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT.replace("prompt: 8", "prompt: 64"))
    run(path, tmp_path / "run", backend=StubBackend())
    for trial in (tmp_path / "run" / "trials").iterdir():
        assert pd.read_parquet(trial / "requests.parquet")["cached_tokens"].sum() == 0


def test_no_finished_cell_at_all_makes_no_report(file: Path, tmp_path: Path) -> None:
    from experiments.analysis.report import write_report

    with pytest.raises(ConfigError, match="no run directory"):
        write_report(tmp_path)
