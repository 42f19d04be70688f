"""bench client: every measurement reads every token, and wrong numbers are refused."""

from __future__ import annotations

import math

import pytest

from research_engine.bench.client_ceiling import Ceiling, ClientBenchOptions, measure


@pytest.mark.timeout(120)
def test_streams_whole_answers_and_the_baseline_are_measured():
    options = ClientBenchOptions(streams=(2,), output_len=5, seconds=0.05, step_ms=0.1)
    found = measure(options)
    assert [ceiling.kind for ceiling in found] == ["streamed", "whole", "aiohttp"]
    for ceiling in found[:2]:
        assert ceiling.tokens == pytest.approx(5 * ceiling.requests)  # all tokens of all requests
    assert all(ceiling.tokens > 0 and ceiling.microseconds > 0 for ceiling in found)


def test_what_a_core_takes_is_told_in_the_kinds_own_unit():
    assert Ceiling("streamed", 1, 100.0, 1.0, 0.5, 10.0).of_a_core == "100k tok/s"
    assert Ceiling("whole", 1, 100.0, 10.0, 0.5, 10.0).of_a_core == "0.02k req/s"


@pytest.mark.parametrize(
    "wrong",
    [
        {"streams": (0,)},
        {"output_len": 0},
        {"seconds": 0.0},
        {"step_ms": -1.0},
        {"seconds": math.inf},
        {"step_ms": math.nan},
    ],
)
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        ClientBenchOptions(**wrong)
