"""Clusters: one replica is the engine itself, several share the work, and nothing is lost between them."""

from __future__ import annotations

import pytest

from research_engine import metrics
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.errors import StalledError
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cluster.cluster import Cluster
from research_engine.simulation.routers import create_router
from tests.simulation.cluster.engines import make, workload


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "chunked_prefill", "priority", "vtc", "mlfq"])
@pytest.mark.parametrize("rate", [3.0, 100.0])
def test_a_cluster_of_one_is_the_engine_itself(policy, rate, overlap):
    alone, member = make(policy, overlap=overlap), make(policy, overlap=overlap)
    replay(alone, workload(40, rate))
    Cluster([member], create_router("round_robin")).run(workload(40, rate))
    assert member.records.steps == alone.records.steps
    assert member.records.requests == alone.records.requests


@pytest.mark.parametrize("router", ["round_robin", "least_tokens", "prefix_affinity"])
def test_every_request_is_served_once_and_whole(router):
    arrivals = workload(80, 60.0)
    report = Cluster([make() for _ in range(3)], create_router(router)).run(arrivals)
    wanted = {a.request_id: (len(a.prompt_token_ids), a.sampling.max_tokens) for a in arrivals}
    assert {r.request_id: (r.prompt_tokens, r.output_tokens) for r in report.requests} == wanted
    assert len(report.requests) == sum(report.routed) == 80
    assert all(0 < share <= 1 for share in report.busy)
    assert [r.finish_time for r in report.requests] == sorted(r.finish_time for r in report.requests)


def test_two_replicas_are_quicker_than_one_at_the_same_load():
    def median(replicas: int) -> float:
        report = Cluster([make() for _ in range(replicas)], create_router("least_tokens")).run(workload(100, 40.0))
        return metrics.percentiles(map(metrics.ttft, report.requests))["p50"]

    assert median(2) < median(1) / 2


def test_arrivals_may_come_from_a_generator_one_by_one():
    taken = []

    def generate():
        for arrival in workload(30, 20.0):
            taken.append(arrival.time)
            yield arrival

    engine = make()
    cluster = Cluster([engine], create_router("round_robin"))
    seen = []
    begin = engine.view
    engine.view = lambda: (seen.append(len(taken)), begin())[1]
    report = cluster.run(generate())
    assert len(report.requests) == 30
    assert seen[0] <= 2  # at the first step the next arrival alone was known


def test_a_request_that_no_replica_can_hold_is_refused_and_the_rest_goes_on():
    too_long = Arrival(0.0, "long", range(500), SamplingParams(max_tokens=3))
    report = Cluster([make(), make()], create_router("least_tokens")).run([too_long, *workload(10, 5.0)])
    assert {r.request_id: r.finish_reason for r in report.requests}["long"] == "refused"
    assert sum(r.finish_reason == "length" for r in report.requests) == 10


def test_a_policy_that_never_serves_is_ended_by_the_engines_own_guard():
    class Never(type(make().scheduler)):
        def order(self, view):
            return ()

    engine = make(stall_limit=20)
    engine._policy.scheduler = Never()
    with pytest.raises(StalledError):
        Cluster([engine], create_router("round_robin")).run(workload(3, 5.0))


def test_wrong_clusters_and_arrivals_are_refused():
    router = create_router("round_robin")
    with pytest.raises(ValueError, match="at least one engine"):
        Cluster([], router)
    engine = make()
    with pytest.raises(ValueError, match="share a clock"):
        Cluster([engine, engine], router)
    first, second = workload(2, 5.0)
    with pytest.raises(ValueError, match="arrivals must come by time"):
        Cluster([engine], router).run([second, first])

    class Elsewhere:
        def route(self, arrival, replicas):
            return 7

    with pytest.raises(ValueError, match="routed 'r0' to 7; it must be one of 0, 1"):
        Cluster([make(), make()], Elsewhere()).run([first])
