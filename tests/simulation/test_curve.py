"""Tables: exact on their points, between them in between, and smooth beyond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research_engine.simulation.curve import Curve, Grid

RISING = st.lists(st.floats(0, 10), min_size=1, max_size=8).map(
    lambda steps: [(2.0**i, sum(steps[: i + 1])) for i in range(len(steps))]
)


def test_a_curve_is_exact_on_its_points_and_linear_between():
    curve = Curve([(4, 8.0), (1, 1.0), (2, 4.0)])
    assert [curve(x) for x in (1, 2, 4)] == [1.0, 4.0, 8.0]
    assert curve(3) == 6.0


def test_beyond_the_last_point_a_curve_goes_on_with_the_slope_of_its_upper_half():
    curve = Curve([(1, 0.0), (2, 10.0), (3, 10.0), (4, 14.0)])
    assert curve(6) == 14.0 + 2 * (14.0 - 10.0) / 2


def test_a_curve_that_falls_at_its_end_does_not_go_on_falling():
    assert Curve([(1, 5.0), (2, 3.0)])(100) == 3.0


@given(RISING, st.floats(0, 1000), st.floats(0, 1000))
def test_a_rising_table_gives_a_rising_curve_on_and_off_the_table(points, one, other):
    curve = Curve(points)
    low, high = sorted((one, other))
    assert curve(low) <= curve(high) + 1e-9


def test_a_grid_needs_no_full_box():
    grid = Grid({(0, 1): 1.0, (0, 3): 3.0, (10, 2): 20.0})
    assert grid(0, 2) == 2.0
    assert grid(10, 99) == 20.0
    assert grid(5, 2) == 11.0


def test_a_grid_goes_on_beyond_each_of_its_axes():
    grid = Grid({(x, y): float(x + y) for x in (1, 2, 4) for y in (1, 2, 4)})
    assert grid(8, 2) == pytest.approx(10.0)
    assert grid(2, 8) == pytest.approx(10.0)
    assert grid(8, 8) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("points", "rule"),
    [
        ([], "at least one"),
        ([(1, -1.0)], ">= 0"),
        ([(1, float("nan"))], "finite"),
        ([(1, 1.0), (1, 2.0)], "two points"),
    ],
)
def test_a_table_that_cannot_be_a_time_is_refused(points, rule):
    with pytest.raises(ValueError, match=rule):
        Curve(points)
