"""hybrid_lookahead: small requests pass one that does not fit, so far and so often and no more."""

from __future__ import annotations

import pytest

from schedulers.hybrid_lookahead import HybridLookahead
from tests.engine.shadow import drain, greedy, make_engine


def order_of_first_service(engine) -> list[str]:
    seen: dict[str, None] = {}
    for step in engine.records.steps:
        seen.update(dict.fromkeys(step.request_ids))
    return list(seen)


@pytest.mark.parametrize("passes", [0, 1, 3, 5])
def test_at_most_max_passes_requests_are_admitted_past_one_that_waits(passes):
    """S8: one seat's worth of small requests in every step, the large one fits only after the running one has ended."""
    engine = make_engine(HybridLookahead(max_passes=passes), num_blocks=16, enable_prefix_caching=False)
    engine.add_request("runs", range(40), greedy(20))
    engine.step()
    engine.add_request("large", range(32), greedy(1))
    for i in range(12):
        engine.add_request(f"small {i}", [i], greedy(1))
        engine.step()
    drain(engine)
    assert order_of_first_service(engine).index("large") == 1 + passes


@pytest.mark.parametrize(("lookahead", "passed"), [(0, False), (1, False), (2, True)])
def test_no_further_is_looked_than_lookahead_requests(lookahead, passed):
    """Two that do not fit stand before one that does."""
    engine = make_engine(HybridLookahead(lookahead=lookahead), num_blocks=16, enable_prefix_caching=False)
    engine.add_request("runs", range(40), greedy(9))
    engine.step()
    for name in ("large 1", "large 2"):
        engine.add_request(name, range(32), greedy(1))
    (small,) = engine.add_request("small", [1], greedy(1))
    engine.step()
    assert small.is_finished == passed
    drain(engine)


def test_without_anything_that_does_not_fit_it_is_first_come_first_served():
    engine = make_engine(HybridLookahead(), max_num_batched_tokens=8, num_blocks=64)
    for i in range(6):
        engine.add_request(str(i), range(100 * i, 100 * i + 10 - i), greedy(2))
    drain(engine)
    assert order_of_first_service(engine) == [str(i) for i in range(6)]


@pytest.mark.parametrize("field", ["lookahead", "max_passes"])
def test_parameters_out_of_range_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} = -1: must be an integer >= 0"):
        HybridLookahead(**{field: -1})
