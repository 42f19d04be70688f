"""Routers: each follows its rule, and a name that is none is answered with those there are."""

from __future__ import annotations

import pytest

from research_engine.engine.driver import Arrival
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cluster.cluster import Cluster
from research_engine.simulation.cluster.replica import ReplicaView
from research_engine.simulation.routers import Router, available_routers, create_router
from tests.simulation.cluster.engines import make


def arrival(prompt) -> Arrival:
    return Arrival(0.0, "a", prompt, SamplingParams())


def views(*tokens: int) -> list[ReplicaView]:
    return [ReplicaView(index, num_requests=1, num_tokens=count) for index, count in enumerate(tokens)]


@pytest.mark.parametrize("name", available_routers())
def test_each_is_a_router_that_names_a_replica(name):
    router = create_router(name)
    assert isinstance(router, Router)
    offset = [ReplicaView(4), ReplicaView(5)]  # indices are names, not places
    assert {router.route(arrival([1]), offset) for _ in range(4)} <= {4, 5}


def test_round_robin_takes_turns():
    router = create_router("round_robin")
    assert [router.route(arrival([1]), views(9, 0, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_tokens_takes_the_emptiest_and_of_equals_the_first():
    router = create_router("least_tokens")
    assert router.route(arrival([1]), views(5, 3, 4)) == 1
    assert router.route(arrival([1]), views(5, 3, 3)) == 1


def test_affinity_sends_a_prefix_where_it_went_before():
    router = create_router("prefix_affinity", block_size=4)
    first, second = list(range(20)), list(range(100, 120))
    assert router.route(arrival(first), views(0, 0)) == 0
    assert router.route(arrival(second), views(20, 0)) == 1
    assert router.route(arrival([*first, 7, 8, 9, 10]), views(40, 20)) == 0
    assert router.route(arrival([*second[:8], *first]), views(40, 60)) == 1
    assert router.route(arrival([1, 2]), views(40, 60)) == 0  # shorter than a block: the emptier one


def test_affinity_gives_way_to_balance():
    router = create_router("prefix_affinity", block_size=4, imbalance=1.5, slack=10)
    prompt = list(range(20))
    router.route(arrival(prompt), views(0, 0))
    assert router.route(arrival(prompt), views(30, 20)) == 0
    assert router.route(arrival(prompt), views(101, 20)) == 1  # 1.5 x the mean, and 10 more


def test_affinity_forgets_what_it_has_not_met_for_longest():
    router = create_router("prefix_affinity", block_size=4, most_blocks=5)
    old, new = list(range(20)), list(range(50, 70))
    router.route(arrival(old), views(0))
    router.route(arrival(new), views(0))
    assert len(router._seen[0]) == 5
    assert router._known(0, router._chain(old)) == 0
    assert router._known(0, router._chain(new)) == 5


def test_affinity_finds_more_in_the_prefix_caches():
    def hits(name: str) -> int:
        shared = [[group * 1000 + i for i in range(40)] for group in range(6)]
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        stream = [Arrival(0.3 * i, str(i), [*shared[(i * 7 + i // 5) % 6], i], sampling) for i in range(60)]
        report = Cluster([make() for _ in range(3)], create_router(name)).run(stream)
        return sum(record.cached_tokens for record in report.requests)

    assert hits("prefix_affinity") > 1.2 * hits("round_robin")


def test_a_router_of_ones_own_comes_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Last:\n    def route(self, arrival, replicas):\n        return replicas[-1].index\n"
    )
    assert create_router(f"{tmp_path}/mine.py:Last").route(arrival([1]), views(0, 0, 0)) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "rule"),
    [("least_token", {}, "no router 'least_token'; valid ones, nearest first: least_tokens"),
     ("prefix_affinity", {"imbalanc": 2}, "no parameter 'imbalanc'; valid ones, nearest first: imbalance"),
     ("prefix_affinity", {"block_size": 0}, "block_size, most_blocks and imbalance must be >= 1"),
     ("round_robin", {"turn": 2}, "no parameter 'turn'; it takes none"),
     ("gone.py:Mine", {}, "no file 'gone.py'")],
)  # fmt: skip
def test_a_wrong_name_or_parameter_is_answered_with_the_valid_ones(name, parameters, rule):
    with pytest.raises(ValueError, match=rule):
        create_router(name, **parameters)
