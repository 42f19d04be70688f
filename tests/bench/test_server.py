"""`bench server`: numbers that measure nothing are refused before a server is started."""

from __future__ import annotations

import math

import pytest

from research_engine.bench.server import ServerBenchOptions


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("connections", 0, ">= 1"),
        ("seconds", 0.0, "finite and > 0"),
        ("seconds", math.nan, "finite and > 0"),
        ("rate", math.nan, "finite and >= 0"),
        ("rate", -1.0, "finite and >= 0"),
        ("soak", math.nan, "finite and >= 0"),
        ("soak", math.inf, "finite and >= 0"),
    ],
)
def test_a_number_that_measures_nothing_is_named(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: must be {rule}"):
        ServerBenchOptions(**{name: value})
