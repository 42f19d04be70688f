"""Plots: every curve can be told from the others, levels lie apart, and titles stay on the page."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from experiments.analysis.plots import LINE, STYLES, drawing, line_style
from experiments.analysis.plots_of_cells import _spread


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


def test_a_long_title_goes_on_below() -> None:
    with drawing("word " * 60, 2.0) as figure:
        lines = figure.get_suptitle().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= LINE
