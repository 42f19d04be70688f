"""Tables, statistics and plots of given trials, to the last character."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from experiments.analysis.cells import CellResults
from experiments.analysis.metrics import METRICS
from experiments.analysis.plots import latency_cdf
from experiments.analysis.statistics import bootstrap_interval, paired_change
from experiments.analysis.table_formats import to_csv, to_latex, to_markdown, to_rich
from experiments.analysis.tables import build_effects, build_table

SHOWN = ("ttft_p50", "itl_p99", "output_throughput", "preemptions")


def summary(ttft: float, itl: float, throughput: float, preemptions: int, **marks: bool) -> dict[str, object]:
    return {
        "kind": "real", "machine": "NVIDIA H200", "void": False, "unstable": False, "disturbed": False,
        "offered_rate": 2.0, "achieved_rate": 2.0,
        "metrics": {"ttft": {"p50": ttft}, "itl": {"p99": itl, "count": 500}, "output_throughput": throughput,
                    "by_priority": {}, "preemption": {"events": preemptions}},
    } | marks  # fmt: skip


@pytest.fixture
def cells() -> list[CellResults]:
    slow = {(0, 0): summary(1.0, 0.050, 100.0, 3), (1, 0): summary(3.0, 0.070, 90.0, 5)}
    fast = {(0, 0): summary(0.5, 0.060, 120.0, 3, unstable=True), (1, 0): summary(0.75, 0.060, 130.0, 5)}
    return [
        CellResults("fcfs", {"scheduler": "fcfs"}, slow, 2),
        CellResults("my_policy", {"scheduler": "my_policy"}, fast, 3),
    ]


def test_markdown_table(cells: list[CellResults]) -> None:
    assert to_markdown(build_table("A & B", cells, SHOWN, ["Workload: 4 requests."])) == (
        "**A & B**\n"
        "\n"
        "|  | fcfs | my_policy |\n"
        "|---|---:|---:|\n"
        "| measured | real, GPU | real, GPU |\n"
        "| verdict | ok | unstable 1/2, 1 of 3 missing |\n"
        "| TTFT P50 (s) | 2.00 ±1.00 | **0.62 ±0.12** |\n"
        "| ITL P99 (ms) | 60 ±10 | 60 ±0 |\n"
        "| Output tokens/s | 95.0 ±5.0 | **125.0 ±5.0** |\n"
        "| Preemptions | 4.0 ±1.0 | 4.0 ±1.0 |\n"
        "\n"
        "Machine: NVIDIA H200.  \n"
        "Mean over 2 seeds ± half the 95 % bootstrap interval (with two seeds: half the range); best mean marked.  \n"
        "2 seeds are too few to show a difference: even if all agree, p is 0.5; 6 are needed for p \\< 0.05: "
        "seeds=[0,1,2,3,4,5].  \n"
        "unstable: requests in the system grew to the end of the arrivals, so latencies depend on the run's length.  \n"
        "Workload: 4 requests.  \n"
    )


def test_a_change_of_what_may_be_0_stands_without_an_interval_and_a_note_says_why() -> None:
    before = CellResults("fcfs", {"scheduler": "fcfs"}, {(s, 0): summary(1, 0.05, 100, 2 * s) for s in (0, 1)}, 2)
    after = CellResults("mine", {"scheduler": "mine"}, {(s, 0): summary(1, 0.05, 100, s) for s in (0, 1)}, 2)
    made = build_effects("title", [before, after], {"scheduler": "fcfs"}, ("ttft_p50", "preemptions"))
    assert made is not None
    assert [entries[0].text for _, entries in made.rows] == ["+0.0 [+0.0, +0.0]", "-50.0"]
    assert "No interval: one seed alone, or a baseline whose own interval reaches 0." in made.notes


def test_a_table_with_disturbed_trials_says_what_helps(cells: list[CellResults]) -> None:
    disturbed = CellResults("fcfs", {}, {(0, 0): summary(1.0, 0.05, 100.0, 3, disturbed=True)}, 1)
    (note,) = [note for note in build_table("title", [disturbed], SHOWN).notes if note.startswith("disturbed: ")]
    for remedy in ("a quieter machine", "OMP_NUM_THREADS=1", "Finished trials are kept: delete", "new --out"):
        assert remedy in note
    assert not any(note.startswith("disturbed: ") for note in build_table("title", cells, SHOWN).notes)


def test_latex_table(cells: list[CellResults]) -> None:
    text = to_latex(build_table("A & B", cells, SHOWN[:1]))
    assert text.splitlines()[:14] == [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        "  \\caption{A \\& B}",
        "  \\begin{tabular}{lrr}",
        "    \\toprule",
        "     & fcfs & my\\_policy \\\\",
        "    \\midrule",
        "    measured & real, GPU & real, GPU \\\\",
        "    verdict & ok & unstable 1/2, 1 of 3 missing \\\\",
        "    \\midrule",
        "    TTFT P50 (s) & 2.00 $\\pm$1.00 & \\textbf{0.62 $\\pm$0.12} \\\\",
        "    \\bottomrule",
        "  \\end{tabular}",
    ]


def test_csv_is_tidy_and_says_what_every_row_ran_on(cells: list[CellResults]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(cells, {"scheduler": "fcfs"}))))
    assert {(row["measured"], row["machine"]) for row in rows} == {("real", "NVIDIA H200")}
    (row,) = [r for r in rows if r["cell"] == "my_policy" and r["metric"] == "output_throughput"]
    assert (row["scheduler"], row["mean"], row["low"], row["high"], row["seeds"]) == (
        "my_policy",
        "125",
        "120",
        "130",
        "2",
    )
    assert float(row["change_percent"]) == pytest.approx(100 * 30 / 95, rel=1e-5)
    assert (float(row["change_low"]), float(row["change_high"])) == pytest.approx(
        (100 * 20 / 100, 100 * 40 / 90), rel=1e-5
    )


def test_many_cells_go_down_the_table(cells: list[CellResults]) -> None:
    many = [CellResults(f"cell {i}", {}, cells[0].summaries, 2) for i in range(8)]
    lines = to_markdown(build_table("many", many, SHOWN)).splitlines()
    assert lines[2] == "|  | measured | verdict | TTFT P50 (s) | ITL P99 (ms) | Output tokens/s | Preemptions |"
    assert lines[4].startswith("| cell 0 | real, GPU | ok | 2.00 ±1.00 |")


def test_a_cell_without_a_finished_trial_is_a_hole(cells: list[CellResults]) -> None:
    text = to_markdown(build_table("hole", [cells[0], CellResults("lost", {}, {}, 2)], SHOWN[:1]))
    assert "| measured | real, GPU | no trial |" in text
    assert "| verdict | ok | 2 of 2 missing |" in text
    assert "| TTFT P50 (s) | 2.00 ±1.00 | - |" in text


def test_cells_without_a_number_are_named_in_place_of_a_column_of_dashes(cells: list[CellResults]) -> None:
    empty = CellResults("mlfq", {"scheduler": "mlfq"}, {}, 2)
    whole, part = build_table("t", cells, ["ttft_p50"]), build_table("t", [empty, *cells], ["ttft_p50"])
    assert whole.of_results() == whole
    shown = part.of_results()
    assert shown is not None and shown.columns == whole.columns and shown.notes[-1] == "No result yet: mlfq."
    assert [len(entries) for _, entries in (*shown.facts, *shown.rows)] == [len(cells)] * (len(shown.facts) + 1)
    assert build_table("t", [empty], ["ttft_p50"]).of_results() is None
    few = CellResults("few", {"scheduler": "few"}, {(0, 0): summary(1.0, 0.05, 100.0, 3)}, 2)
    few.summaries[0, 0]["metrics"]["itl"]["count"] = 5  # which is no hole, though there is no number
    told = build_table("t", [few, empty], ["itl_p99"]).of_results()
    assert told is not None and told.columns == ["few"]


def test_metrics_have_distinct_labels() -> None:
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)


def test_interval_of_two_seeds_is_their_range_and_of_one_is_unknown() -> None:
    assert bootstrap_interval([1.0, 3.0]) == (2.0, 1.0, 3.0)
    one = bootstrap_interval([5.0])
    assert one.mean == 5.0
    assert math.isnan(one.low)


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        interval = bootstrap_interval(rng.normal(10, 2, 30).tolist())
        hits += interval.low <= 10 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_changes_are_paired_by_seed() -> None:
    change = paired_change({0: 11.0, 1: 101.0, 2: 5.0}, {0: 10.0, 1: 100.0, 9: 1.0})
    assert change.difference == (1.0, 1.0, 1.0)  # the same +1 under both seeds: no spread
    assert change.percent == pytest.approx((100 / 55, 1.0, 10.0))


def test_the_plot_is_written_for_screen_and_paper(tmp_path: Path) -> None:
    values = {"ttft": [0.1, 0.4, 2.0], "itl": [0.01] * 20, "e2e": [1.0, 2.0]}
    files = latency_cdf({"fcfs": values, "other": values}, "title", tmp_path / "latency")
    assert [file.name for file in files] == ["latency.png", "latency.pdf"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert files[1].read_bytes().startswith(b"%PDF")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latency.pdf", "latency.png"]


@pytest.mark.parametrize("label", ["[8, 16]", "*"])
def test_a_latex_row_is_no_argument_of_the_row_before(label: str) -> None:
    """`\\\\[8pt]` and `\\\\*` mean something to LaTeX, across a line's end too."""
    rows = [CellResults(label, {}, {(0, 0): summary(0, 0.01, 10.0, 0)}, 1) for _ in range(6)]
    lines = to_latex(build_table("title", rows, SHOWN[:1])).splitlines()
    assert sum(line.strip().startswith("{}" + label[0]) for line in lines) == 6
    assert not any(line.strip().startswith(label[0]) for line in lines)


def test_a_terminal_table_shows_brackets_as_they_are() -> None:
    out = io.StringIO()
    cells = [CellResults("[red]", {}, {(0, 0): summary(0, 0.01, 10.0, 0)}, 1)]
    made = build_table("changed: scheduler=[fcfs,sjf]", cells, SHOWN, ["Policy: [bold]."])
    Console(width=200, file=out).print(to_rich(made, 200))
    assert all(text in out.getvalue() for text in ("scheduler=[fcfs,sjf]", "[red]", "[bold]"))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminal_table_cuts_nothing_off(width: int) -> None:
    """Many cells: columns that do not fit stand in a further table below, with every cell's whole name."""
    cells = [CellResults(f"policy_number_{i}", {}, {(0, 0): summary(i, 0.01 * i, 10.0, i)}, 1) for i in range(1, 12)]
    out = io.StringIO()
    console = Console(width=width, file=out)
    console.print(to_rich(build_table("title", cells, SHOWN), width))
    shown = out.getvalue()
    assert "…" not in shown
    assert shown.count("policy_number_11 ") == shown.count("┏") >= 1
    for word in ("TTFT", "tokens/s", "Preemptions"):
        assert word in shown
