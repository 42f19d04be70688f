"""Virtual time goes where it is told, and never back."""

from __future__ import annotations

import math

import pytest

from research_engine.engine.contract import Clock
from research_engine.simulation.clock import VirtualClock


def test_it_is_a_clock():
    assert isinstance(VirtualClock(), Clock)


def test_it_stands_still_until_moved():
    clock = VirtualClock(2.0)
    clock.advance(0.5)
    assert (clock.now(), clock.now()) == (2.5, 2.5)


def test_sleeping_until_a_moment_that_is_past_changes_nothing():
    clock = VirtualClock(2.0)
    clock.sleep_until(1.0)
    assert clock.now() == 2.0
    clock.sleep_until(3.0)
    assert clock.now() == 3.0


@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
def test_a_step_that_takes_no_possible_time_is_refused(seconds):
    with pytest.raises(ValueError, match="finite number >= 0"):
        VirtualClock().advance(seconds)


def test_what_a_reader_does_takes_its_time_after_the_reading():
    clock = VirtualClock(2.0)
    clock.advance_after_reading(0.5)
    assert (clock.now(), clock.now()) == (2.0, 2.5)


def test_time_owed_passes_whatever_comes_next():
    for move, end in ((lambda clock: clock.advance(1.0), 3.5), (lambda clock: clock.sleep_until(4.0), 4.0),
                      (lambda clock: clock.sleep_until(1.0), 2.5)):  # fmt: skip
        clock = VirtualClock(2.0)
        clock.advance_after_reading(0.5)
        move(clock)
        assert (clock.now(), clock.now()) == (end, end)


@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf])
def test_a_reader_that_takes_no_possible_time_is_refused(seconds):
    with pytest.raises(ValueError, match="finite number >= 0"):
        VirtualClock().advance_after_reading(seconds)
