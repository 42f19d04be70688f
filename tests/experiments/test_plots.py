"""Plots: every curve can be told from the others, levels lie apart, and titles stay on the page."""

from __future__ import annotations

from itertools import pairwise

import pytest
from matplotlib.figure import Figure

from experiments.analysis.plots import LINE, STYLES, _scale, drawing, line_style
from experiments.analysis.plots_of_cells import _grow, _spread


def test_as_many_curves_as_colours_times_lines_all_differ() -> None:
    count = len(STYLES) ** 2
    assert len({(color, repr(line)) for color, line in map(line_style, range(count))}) == count


@pytest.mark.parametrize(
    ("levels", "scale"),
    [([8.0, 16.0, 64.0, 256.0], "log"), ([1.0, 2.0, 4.0], "linear"), ([0.0, 1.0, 100.0], "linear"), ([], "linear")],
)
def test_levels_of_several_powers_of_two_lie_apart(levels: list[float], scale: str) -> None:
    axis = Figure().subplots()
    _spread(axis, levels)
    assert axis.get_xscale() == scale
    if scale == "log":
        assert [label.get_text() for label in axis.get_xticklabels()] == ["8", "16", "64", "256"]


@pytest.mark.parametrize("largest", [0.0157, 0.3, 1.0, 9.6, 123.0])
def test_numbers_along_a_distribution_do_not_run_into_one_another(largest: float) -> None:
    with drawing("title", 2.7) as figure:
        axes = figure.subplots(1, 3)
        for axis in axes:
            axis.plot([0.0, largest], [0.0, 1.0])
            _scale(axis, [largest, 0.9 * largest])
        figure.draw_without_rendering()
        for axis in axes:
            boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
            low, high = axis.get_xlim()
            shown = [box for box, at in zip(boxes, axis.get_xticks(), strict=True) if low <= at <= high]
            assert len(shown) > 2 and all(one.x1 < other.x0 for one, other in pairwise(shown))


def test_no_point_lies_on_the_upper_edge() -> None:
    axis = Figure().subplots()
    axis.plot([1, 2], [8.9, 9.4])
    _grow(axis, [8.9, 9.4])
    assert axis.get_ylim() == pytest.approx((0, 1.06 * 9.4))


def test_a_long_title_goes_on_below() -> None:
    with drawing("word " * 60, 2.0) as figure:
        lines = figure.get_suptitle().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= LINE
