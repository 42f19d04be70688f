"""Victim rules and the way victims go: each picks what its name says, of those that may be asked."""

from __future__ import annotations

import pytest

import schedulers
from schedulers.base import PolicyScheduler
from schedulers.victims import VICTIM_RULES
from tests.engine.shadow import drain, greedy, make_engine


@pytest.mark.parametrize(
    ("rule", "victim"),
    [
        (None, "last"),
        ("last_admitted", "last"),
        ("fewest_tokens_lost", "tokens"),
        ("most_blocks_freed", "blocks"),
        ("lowest_priority", "priority"),
        ("longest_remaining", "remaining"),
    ],
)
def test_a_rule_picks_what_its_name_says(rule, victim):
    """All run and none was served yet; the first admitted needs more than there is."""
    policy = PolicyScheduler(victim_rule=rule, watermark=0.0)
    engine = make_engine(policy, num_blocks=13, enable_prefix_caching=False)
    engine.add_request("needy", range(8), greedy(9))
    engine.add_request("tokens", range(2), greedy(9), predicted_tokens=5)
    engine.add_request("blocks", range(14), greedy(9), predicted_tokens=5)
    engine.add_request("priority", range(8), greedy(9), predicted_tokens=5, priority=3)
    engine.add_request("remaining", range(8), greedy(9), predicted_tokens=8)
    engine.add_request("last", range(8), greedy(9), predicted_tokens=5)
    engine.step()
    assert engine.view().num_running == 6 and engine.view().num_free_blocks == 0
    engine.step()
    assert engine.records.steps[-1].preemptions[0].request_id == victim
    drain(engine)


@pytest.mark.parametrize("rule", sorted(VICTIM_RULES))
def test_ties_go_to_the_last_admitted(rule):
    engine = make_engine(PolicyScheduler(), enable_prefix_caching=False)
    for i in range(3):
        engine.add_request(str(i), range(10 * i, 10 * i + 4), greedy(4))
    engine.step()
    view = engine.view()
    assert VICTIM_RULES[rule](view.running, view).id == "2"
    drain(engine)


@pytest.mark.parametrize("name", schedulers.available())
def test_an_unknown_rule_is_refused_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"victim_rule = 'oldest': must be one of 'last_admitted', .*or None"):
        schedulers.create(name, victim_rule="oldest")


def test_a_policy_that_chooses_victims_itself_refuses_a_rule():
    class Own(PolicyScheduler):
        def victim(self, candidates, needy, view):
            return candidates[0]

    with pytest.raises(ValueError, match="must be None, for Own has a method victim of its own"):
        Own(victim_rule="last_admitted")


@pytest.mark.parametrize(("recompute", "swap", "mode"), [(1.0, 0.1, "swap"), (0.01, 1.0, "recompute")])
def test_cheaper_takes_the_way_that_costs_less(recompute, swap, mode):
    policy = PolicyScheduler(preemption="cheaper", recompute_seconds=recompute, swap_seconds=swap, watermark=0.0)
    engine = make_engine(policy, num_blocks=4, num_host_blocks=8)
    for name in "ab":
        engine.add_request(name, range(ord(name), ord(name) + 6), greedy(9))
    drain(engine)
    assert {p.mode for step in engine.records.steps for p in step.preemptions} == {mode}


def test_cheaper_decides_for_each_victim():
    """With 8 s a block of 4 and 3 s a token, a victim of 2 tokens is computed again and one of 8 swapped."""
    policy = PolicyScheduler(preemption="cheaper", recompute_seconds=3.0, swap_seconds=8.0)
    engine = make_engine(policy)
    short = engine.add_request("short", range(2), greedy(4))[0]
    long = engine.add_request("long", range(50, 58), greedy(4))[0]
    engine.step()
    assert (policy.mode(short), policy.mode(long)) == ("recompute", "swap")
    drain(engine)


@pytest.mark.parametrize("field", ["recompute_seconds", "swap_seconds"])
def test_a_cost_below_zero_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} = -1: must be seconds >= 0"):
        PolicyScheduler(**{field: -1})
