"""The searches end at the edge: what they return meets the limits, and a little more does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.capacity.search import find_capacity, find_copies


@dataclass(frozen=True)
class Run:
    good: bool

    def meets(self, attainment: float) -> bool:
        return self.good


@given(st.floats(0.05, 1000), st.floats(0.1, 1000), st.floats(0.005, 0.2))
def test_bisection_ends_within_its_tolerance_below_the_edge(edge, begin, tolerance):
    found = find_capacity(
        lambda rate, seed: Run(rate <= edge), lambda seed: begin, [0], attainment=0.9, tolerance=tolerance
    )
    if begin / 4096 <= edge <= begin * 2048:
        assert found.rates[0] <= edge < found.rates[0] * (1 + tolerance) * (1 + 1e-9)


def test_each_seed_has_its_own_edge_and_the_interval_spans_them():
    found = find_capacity(
        lambda rate, seed: Run(rate <= 10 + seed), lambda seed: 16.0, range(5), attainment=0.9, tolerance=0.001
    )
    assert found.rates == {seed: pytest.approx(10 + seed, rel=0.002) for seed in range(5)}
    assert found.interval.low < 12 < found.interval.high
    assert set(found.runs) == set(range(5))


def test_limits_that_nothing_meets_give_no_rate():
    found = find_capacity(lambda rate, seed: Run(False), lambda seed: 8.0, [0], attainment=0.9)
    assert found.rates == {0: 0.0}


@given(st.integers(1, 300), st.integers(1, 300))
def test_copies_are_the_fewest_that_do(edge, guess):
    asked = []

    def run(copies: int, seed: int) -> Run:
        asked.append(copies)
        return Run(copies >= edge)

    found = find_copies(run, guess, [0], attainment=0.9)
    assert found.needed == {0: edge}
    assert len(asked) == len(set(asked)) <= 30


def test_the_safe_number_does_under_every_seed():
    found = find_copies(lambda copies, seed: Run(copies >= 3 + seed), 3, range(3), attainment=0.9)
    assert found.needed == {0: 3, 1: 4, 2: 5}
    assert found.safe == 5


def test_a_traffic_that_no_number_carries_is_told():
    with pytest.raises(ValueError, match="8 copies still miss the limits"):
        find_copies(lambda copies, seed: Run(False), 2, [0], attainment=0.9, most=8)
