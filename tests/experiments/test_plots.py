"""Plots: every curve can be told from the others."""

from __future__ import annotations

from experiments.analysis.plots import STYLES, line_style


def test_as_many_curves_as_colours_times_lines_all_differ() -> None:
    count = len(STYLES) ** 2
    assert len({(color, repr(line)) for color, line in map(line_style, range(count))}) == count
