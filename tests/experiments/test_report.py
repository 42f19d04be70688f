"""What is made of a run's files: every plot, one page without a network, Parquet for DuckDB, and all of it again."""

from __future__ import annotations

import io
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments.analysis.metrics import METRICS
from experiments.analysis.plots_of_cells import _is_beaten, numeric_factors
from experiments.analysis.report import write_report
from experiments.analysis.run_files import RunFiles
from experiments.analysis.statistics import NO_CHANGE, Change, Interval
from experiments.compare import Difference, _digits, _results_of
from experiments.config import ConfigError
from research_engine import metrics
from research_engine.cli import main as command
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_config import EXPERIMENT
from tests.experiments.test_launchers import run

KINDS = (
    "latency_cdf",
    "latency_load",
    "pareto",
    "kv_over_time",
    "batch_composition",
    "fairness_over_time",
    "heatmap",
    "bars",
)
WORDS = ("seeds=[0,1,2,3,4,5]", "workload.num_requests=12", "workload.clients={a: 0.5, b: 0.5}", "num_blocks=16",
         "workload.lengths={source: uniform, prompt: [4, 60], output: [2, 20]}", "factors.block_size=[8, 16]",
         "baseline.block_size=16", f"outputs.plots=[{','.join(KINDS)}]")  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "mine.yaml").write_text(EXPERIMENT.replace("outputs: {plots: []}\n", ""))
    run(folder / "mine.yaml", folder / "run", *WORDS, backend=StubBackend())
    return folder / "run"


def test_every_plot_is_made_for_screen_and_paper(finished: Path) -> None:
    for kind in KINDS:
        name = "latency" if kind == "latency_cdf" else kind
        assert (finished / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (finished / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_needs_nothing_but_itself(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(KINDS)
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "http" not in re.sub(r'base64,[^"]*', "", page)
    for part in (
        "<caption>mine: test; changed: workload.num_requests=12 workload.clients=",
        "changes</caption>",
        "<h2>Environment</h2>",
        "<h2>Configuration</h2>",
    ):
        assert part in page


def test_a_plots_line_says_what_it_is_of_and_by_which_factors(finished: Path) -> None:
    caption = RunFiles.of(finished).caption
    assert caption.startswith("mine  ·  dummy:tiny  ·  ")
    assert "simulated: simulated" not in caption and "  ·  by " in caption


def test_plots_that_compare_cells_carry_the_tables_verdict(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    suptitle = Figure.suptitle

    def note(figure: Figure, text: str, **how: Any) -> Any:
        titles.append(text)
        return suptitle(figure, text, **how)

    monkeypatch.setattr(Figure, "suptitle", note)
    write_report(finished)
    told = dict(zip(KINDS, titles, strict=True))
    assert re.search(r"\nTTFT P90 against fcfs, 16: .*\nITL P9\d against fcfs, 16: .*\nE2E P90", told["latency_cdf"])
    for kind, lines in {"latency_load": 3, "pareto": 2, "heatmap": 1, "bars": 1}.items():
        assert told[kind].count(" against fcfs, 16: ") == lines, told[kind]
    for kind in ("kv_over_time", "batch_composition", "fairness_over_time"):
        assert " against " not in told[kind]


def test_everything_is_made_again_from_files_alone(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = ["table.md", "table.csv", "table.tex", "effects.md", "effects.tex", "results.parquet", "report.html",
            "latency.png", "heatmap.pdf"]  # fmt: skip
    before = {name: (finished / name).read_bytes() for name in made}
    for name in made:
        (finished / name).unlink()
    assert command(["report", str(finished)]) == 0
    assert {name: (finished / name).read_bytes() for name in made} == before
    assert "report.html and what lies beside it are made again" in " ".join(capsys.readouterr().out.split())


def test_a_plot_of_what_a_run_lacks_says_so_and_the_others_are_made(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    plots = "outputs.plots=[fairness_over_time, heatmap, latency_load, bars]"
    run(tmp_path / "mine.yaml", tmp_path / "run", "seeds=0", plots, backend=StubBackend())
    page = (tmp_path / "run" / "report.html").read_text()
    assert "fairness_over_time was not drawn: fairness_over_time needs at least two clients" in page
    assert "heatmap was not drawn: a heat map needs two factors" in page
    assert "latency_load was not drawn: latency_load needs a factor of numbers" in page
    assert (tmp_path / "run" / "bars.png").exists()


def test_a_row_of_results_is_a_trial_with_every_metric(finished: Path) -> None:
    results = pd.read_parquet(finished / "results.parquet")
    assert len(results) == 4 * 6
    assert set(results["factor_block_size"]) == {"8", "16"}
    for row in results.to_dict("records")[:3]:
        summary = json.loads((finished / "trials" / row["directory"] / "summary.json").read_text())
        assert row["ttft_p50"] == summary["metrics"]["ttft"]["p50"]
        assert row["seed"] == summary["seed"]


def test_duckdb_reads_requests_and_results_directly(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(finished.parent)
    rows = duckdb.sql("""
        SELECT results.cell, count(*) AS requests, quantile_cont(requests.ttft, 0.9) AS ttft_p90
        FROM read_parquet('run/trials/*/requests.parquet', filename = true) AS requests
        JOIN 'run/results.parquet' AS results
          ON requests.filename = 'run/trials/' || results.directory || '/requests.parquet'
        WHERE requests.completed GROUP BY results.cell ORDER BY results.cell
    """).fetchall()
    assert [(cell, count) for cell, count, _ in rows] == [
        ("fcfs, 16", 72), ("fcfs, 8", 72), ("priority, 16", 72), ("priority, 8", 72)]  # fmt: skip


def test_gaps_between_tokens_are_the_same_from_requests_as_from_steps(finished: Path) -> None:
    files = RunFiles.of(finished)
    trial = files.finished()[0]
    records = files.records(trial)
    frame = pd.read_parquet(files.folder(trial) / "requests.parquet")
    gaps = [b - a for times in frame["token_times"] for a, b in pairwise(times)]
    assert sorted(gaps) == sorted(metrics.inter_token_latencies(records))


def test_the_effects_compare_each_policy_under_its_own_block_size(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    words = [word for word in WORDS[:-2] if "block_size=16" not in word]
    run(tmp_path / "mine.yaml", tmp_path / "run", *words, backend=StubBackend())
    lines = (tmp_path / "run" / "effects.md").read_text().splitlines()
    assert lines[2].startswith("| change (%) | priority, 8 | priority, 16 |")
    assert lines[4] == "| against | fcfs, 8 | fcfs, 16 |"


def test_one_seed_has_the_spread_within_its_run(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    words = ["seeds=0", "workload.num_requests=40", "outputs.table=[ttft_mean, ttft_p99]"]
    run(tmp_path / "mine.yaml", tmp_path / "run", *words, backend=StubBackend())
    table = (tmp_path / "run" / "table.md").read_text()
    assert re.search(r"\| TTFT mean \(s\) \| \**[0-9.]+ ±[0-9.]+", table)
    assert "| TTFT P99 (s) | n \\< 459 | n \\< 459 |" in table
    assert "± is half the 95 % interval of batch means within the run" in table


def test_repeats_of_a_seed_are_averaged_and_are_no_seeds(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    run(tmp_path / "mine.yaml", tmp_path / "run", "repeats=3", "seeds=[0,1]", backend=StubBackend())
    (cell, _) = RunFiles.of(tmp_path / "run").cells
    assert (len(cell.summaries), cell.planned, cell.seeds) == (6, 6, {0, 1})
    assert "Mean over 2 seeds" in (tmp_path / "run" / "table.md").read_text()


def test_only_a_cell_that_is_better_in_both_beats_another() -> None:
    points = [(10.0, 1.0), (10.0, 2.0), (5.0, 0.5), (4.0, 0.6)]
    assert [_is_beaten(point, points) for point in points] == [False, True, False, True]


def test_factors_of_numbers_are_told_from_others(finished: Path) -> None:
    assert numeric_factors(RunFiles.of(finished).cells) == ["block_size"]


def test_a_directory_that_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no run directory"):
        write_report(tmp_path)
    assert command(["report", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("config.yaml", "[1]", "config.yaml holds no experiment"),
        ("config.yaml", "", "config.yaml holds no experiment"),
        ("trials.json", "{}", "trials.json must be a list of trials with cell, directory, levels, seed"),
        ("trials.json", '[{"cell": 5}]', "trials.json must be a list of trials with cell, directory, levels, seed"),
        ("environment.json", "[]", "environment.json must be a mapping"),
    ],
)
def test_a_run_with_a_file_of_another_form_is_told(finished: Path, name: str, text: str, told: str) -> None:
    damaged = _copied(finished)
    (damaged / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{damaged}: no run directory: {told}")):
        write_report(damaged)


@pytest.mark.parametrize("content", [None, b"PAR1"])
def test_a_damaged_trial_is_named_with_its_remedy(finished: Path, content: bytes | None) -> None:
    damaged = _copied(finished)
    path = next((damaged / "trials").glob("*/requests.parquet"))
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read; remove {path.parent} and run")):
        write_report(damaged)


@pytest.mark.parametrize("text", ['{"metrics": 5, "kind": "real"}', '{"metrics": {}}', '{"metrics'])
def test_a_summary_that_no_trial_wrote_is_none(finished: Path, text: str) -> None:
    damaged = _copied(finished)
    next((damaged / "trials").glob("*/summary.json")).write_text(text)
    assert len(RunFiles.of(damaged).summaries) == len(RunFiles.of(finished).summaries) - 1


def _copied(run: Path) -> Path:
    copy = run.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    return copy


# compare


def test_compare_says_what_differs_and_what_is_real(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = finished.parent / "faster"
    run(finished.parent / "mine.yaml", other, *WORDS[:-1], "max_num_batched_tokens=16", backend=StubBackend())
    assert command(["compare", str(finished), str(other), "--json", "--metric", "ttft_p50", "request_throughput"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["configuration"]["base.max_num_batched_tokens"] == [None, 16]
    assert told["environment"] == {}
    row = next(r for r in told["results"] if (r["cell"], r["metric"]) == ("fcfs, 16", "ttft_p50"))
    assert row["seeds"] == 6 and row["same_requests"]
    assert row["verdict"] in ("real", "not shown")
    assert row["change_percent"][0] == pytest.approx(100 * (row["b"] - row["a"]) / row["a"])
    assert command(["compare", str(finished), str(other)]) == 0
    assert "max_num_batched_tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "digits"),
    [(0.0124, 0.0161, 4), (0.0124, 12.0, 4), (123.0, 456.0, 2), (1.5, 0.0, 2), (0.0, 0.0, 2), (1e-30, 1.0, 9)],
)
def test_compared_means_are_printed_with_three_digits_that_count(before: float, after: float, digits: int) -> None:
    assert _digits(Difference("cell", "ttft_p50", before, after, NO_CHANGE, True), 2) == digits


def test_eighty_columns_hold_every_compared_metric_whole() -> None:
    change = Change(Interval(1.0, 0.5, 2.0), Interval(-99.1, -123.4, 234.5), 0.0312, 4)
    differences = [Difference("fcfs, 16", name, 1e-5, 3.5, change, False) for name in METRICS]
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(_results_of(differences))
    shown = buffer.getvalue()
    words = {word for name in METRICS for word in METRICS[name].label.split()}
    assert not [word for word in words | {"verdict", "interval", "change", "open *"} if word not in shown]
    assert shown.count("-123.4 to +234.5") == shown.count("0.0000100") == len(METRICS)
    assert "\u2026" not in shown


def test_a_run_does_not_differ_from_itself(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["compare", str(finished), str(finished), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["configuration"], told["environment"]) == ({}, {})
    assert {row["verdict"] for row in told["results"]} == {"none"}


def test_compare_tells_trials_of_several_environments(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = _copied(finished)
    changed = next((mixed / "trials").iterdir()) / "environment.json"
    facts = json.loads(changed.read_text())
    facts["packages"]["numpy"] = "0.1"
    facts["threads"] = "77"  # which a simulation does not depend on
    changed.write_text(json.dumps(facts))
    assert command(["compare", str(finished), str(mixed), "--json"]) == 0
    environment = json.loads(capsys.readouterr().out)["environment"]
    assert "0.1 (1 trial)" in environment.pop("packages.numpy")[1]
    assert not environment.keys() - {"threads"}
    changed.unlink()
    assert command(["compare", str(finished), str(mixed), "--json"]) == 0
    environment = json.loads(capsys.readouterr().out)["environment"]
    before, after = environment.pop("no record")
    assert before is None and after.startswith("1 trial (") and not environment.keys() - {"threads"}


def test_other_requests_under_the_same_seed_are_told(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = finished.parent / "other"
    run(finished.parent / "mine.yaml", other, *WORDS[:-1], "workload.arrivals.rate=9", backend=StubBackend())
    assert command(["compare", str(finished), str(other), "--json", "--metric", "ttft_p50"]) == 0
    assert not any(row["same_requests"] for row in json.loads(capsys.readouterr().out)["results"])


def test_a_wrong_metric_and_runs_without_a_common_cell_are_told(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["compare", str(finished), str(finished), "--metric", "ttft_p5"]) == 2
    assert "no metric 'ttft_p5'; valid ones, nearest first: ttft_p50" in capsys.readouterr().err
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    run(tmp_path / "mine.yaml", tmp_path / "run", "seeds=0", backend=StubBackend())
    assert command(["compare", str(finished), str(tmp_path / "run")]) == 2
    assert "no cell in common" in capsys.readouterr().err
