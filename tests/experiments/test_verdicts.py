"""A plot says of differences what the tables say: their size where they are shown, and else that they are not."""

from __future__ import annotations

import math

import pytest

from experiments.analysis.cells import CellResults
from experiments.analysis.plots import drawing
from experiments.analysis.tables import build_effects
from experiments.analysis.verdicts import tail_metrics, verdict_lines
from tests.experiments.test_tables import summary

BASELINE = {"scheduler": "A"}


def cell(label: str, ttft: list[float], itl: float = 0.05, **marks: bool) -> CellResults:
    done = {(seed, 0): summary(value, itl, 100.0, 0, **marks) for seed, value in enumerate(ttft)}
    return CellResults(label, {"scheduler": label}, done, len(ttft))


REFERENCE = cell("A", [2.0, 2.2, 1.9, 2.1, 2.0, 1.8])
FASTER = cell("B", [1.7, 1.9, 1.7, 1.85, 1.75, 1.6])
ALIKE = cell("C", [2.1, 2.1, 2.0, 2.0, 2.1, 1.7])


def test_a_shown_difference_has_the_size_and_the_interval_of_the_table() -> None:
    (line,) = verdict_lines([REFERENCE, FASTER, ALIKE], BASELINE, ["ttft_p50"])
    assert line == "TTFT P50 against A: B -12 % (95 % CI -14 to -11); C not shown to differ"
    effects = build_effects("t", [REFERENCE, FASTER, ALIKE], BASELINE, ["ttft_p50"])
    assert effects is not None
    shown, other = effects.rows[0][1]
    assert shown.text.startswith("-12.5 [-13.") and shown.mark and not other.mark


def test_what_differs_nowhere_and_a_small_change_are_told() -> None:
    small = cell("D", [value * 1.002 for value in (2.0, 2.2, 1.9, 2.1, 2.0, 1.8)])
    same = cell("E", [2.0, 2.2, 1.9, 2.1, 2.0, 1.8])
    (line,) = verdict_lines([REFERENCE, small, same], BASELINE, ["ttft_p50"])
    assert line == "TTFT P50 against A: D +0.20 % (95 % CI +0.20 to +0.20); E no difference"


def test_few_seeds_decide_nothing_and_say_so_once() -> None:
    few = [cell("A", [2.0, 2.2], 0.05), cell("B", [1.0, 1.1], 0.06)]
    names = ["ttft_p50", "itl_p99"]
    assert verdict_lines(few, BASELINE, names) == ["Nothing is decided against A: fewer than 6 seeds"]
    few[1] = cell("B", [1.0, 1.1], 0.05)
    assert verdict_lines(few, BASELINE, names) == [
        "TTFT P50 against A: B not decided, fewer than 6 seeds",
        "ITL P99 against A: B no difference",
    ]


def test_of_many_cells_it_is_told_how_many_differ() -> None:
    many = [REFERENCE, ALIKE, *(cell(f"B{i}", [1.7, 1.9, 1.7, 1.85, 1.75, 1.6]) for i in range(4))]
    assert verdict_lines(many, BASELINE, ["ttft_p50"]) == ["TTFT P50 against A: 4 of 5 shown to differ"]


@pytest.mark.parametrize(
    "cells", [[REFERENCE], [REFERENCE, cell("B", [math.nan] * 6)], [REFERENCE, cell("B", [1.0] * 6, disturbed=True)]]
)
def test_nothing_is_said_of_what_cannot_be_compared(cells: list[CellResults]) -> None:
    assert verdict_lines(cells, BASELINE, ["ttft_p50"]) == []
    assert verdict_lines([REFERENCE, FASTER], {}, ["ttft_p50"]) == []


def test_a_distribution_is_judged_by_the_last_percentile_that_the_table_has() -> None:
    cells = [REFERENCE, FASTER]
    shown = ["ttft_p90", "ttft_p50", "itl_p99", "itl_p50"]  # a summary here has the P50 of TTFT and the P99 of ITL
    assert tail_metrics(["ttft", "itl", "e2e"], shown, cells, BASELINE) == ["ttft_p50", "itl_p99"]


def test_each_line_of_a_title_makes_the_figure_higher() -> None:
    with drawing("one", 2.0) as alone, drawing("one\ntwo\nthree", 2.0) as three:
        assert three.get_suptitle() == "one\ntwo\nthree"
        assert three.get_figheight() > alone.get_figheight() == 2.0
