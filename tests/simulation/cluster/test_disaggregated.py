"""Prefill apart from decode: times add up by hand, both halves are one record, and memory is waited for."""

from __future__ import annotations

import pytest

from research_engine import metrics
from research_engine.engine.driver import Arrival
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cluster.cluster import Cluster
from research_engine.simulation.cluster.disaggregated import Disaggregated, KVLink
from research_engine.simulation.routers import create_router
from tests.simulation.cluster.engines import make, workload

LINK = KVLink(bytes_per_token=1000.0, bandwidth=100_000.0, latency=0.05)  # 10 ms a token

QUICK = KVLink(bytes_per_token=1.0, bandwidth=1e12)


def cluster(prefill: int = 1, decode: int = 1, link: KVLink = LINK, **sizes) -> Disaggregated:
    engines = [make() for _ in range(prefill)], [make(**sizes) for _ in range(decode)]
    return Disaggregated(*engines, create_router("least_tokens"), create_router("least_tokens"), link)


def request(name: str, prompt: int, output: int, time: float = 0.0) -> Arrival:
    base = sum(map(ord, name)) * 1000
    return Arrival(time, name, range(base, base + prompt), SamplingParams(max_tokens=output, ignore_eos=True))


def test_a_request_takes_its_prefill_its_transfer_and_its_decodes():
    system = cluster()
    report = system.run([request("a", prompt=20, output=5, time=1.0)])
    (record,) = report.requests
    assert metrics.ttft(record) == pytest.approx(0.01 + 0.020)
    sent = 0.05 + 20 * 0.01
    # the first step on the decode side computes the first token and draws the second: 4 steps of one token
    assert metrics.e2e(record) == pytest.approx(0.03 + sent + 4 * (0.01 + 0.0001) + 3 * 0.0005)
    assert (record.prompt_tokens, record.output_tokens, record.max_tokens, record.finish_reason) == (20, 5, 5, "length")
    assert report.transfers == {"count": 1, "bytes": 20_000.0, "mean_seconds": pytest.approx(sent)}
    steps = [step for replica in system.replicas for step in replica.engine.records.steps]
    assert [(step.starts, step.num_tokens) for step in steps] == [
        ([0], [20]), ([20], [1]), ([21], [1]), ([22], [1]), ([23], [1])
    ]  # fmt: skip


def test_one_link_sends_one_request_after_the_other():
    report = cluster().run([request("a", 20, 2), request("b", 20, 2)])
    a, b = (metrics.e2e(record) for record in report.requests)
    assert b - a == pytest.approx(LINK.seconds(20))


def test_a_request_of_one_token_is_never_sent():
    report = cluster().run([request("a", 20, 1)])
    assert report.transfers["count"] == 0
    assert metrics.e2e(report.requests[0]) == pytest.approx(0.03)


def test_every_request_is_served_once_and_whole():
    arrivals = workload(80, 50.0)
    report = cluster(prefill=2, decode=2).run(arrivals)
    wanted = {a.request_id: (len(a.prompt_token_ids), a.sampling.max_tokens) for a in arrivals}
    assert {r.request_id: (r.prompt_tokens, r.output_tokens) for r in report.requests} == wanted
    assert all(r.first_token_time <= r.last_token_time <= r.finish_time for r in report.requests)


def test_decodes_are_not_held_up_by_prefills():
    arrivals = workload(60, 15.0)
    apart = cluster(link=QUICK, num_blocks=400).run(arrivals).requests
    together = (
        Cluster([make(num_blocks=400), make(num_blocks=400)], create_router("least_tokens")).run(arrivals).requests
    )
    worst = [max(metrics.tpot(r) for r in requests if r.output_tokens > 10) for requests in (apart, together)]
    assert worst[0] < 0.7 * worst[1]


def test_kv_that_finds_no_room_waits_and_what_is_preempted_is_computed_anew():
    arrivals = [request(name, prompt=40, output=30) for name in "abcd"]
    report = cluster(num_blocks=36, link=QUICK).run(arrivals)  # two requests fit to their ends, three at first
    assert {r.finish_reason for r in report.requests} == {"length"}
    assert sum(r.preemptions for r in report.requests) > 0
    assert sum(r.recomputed_tokens for r in report.requests) > 0


def test_a_rest_that_the_decode_side_cannot_hold_is_refused_with_its_first_token_out():
    report = cluster(num_blocks=12).run([request("a", prompt=40, output=30), request("b", prompt=10, output=5)])
    reasons = {record.request_id: record.finish_reason for record in report.requests}
    assert reasons == {"a": "refused", "b": "length"}


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_a_link_that_cannot_be_is_refused(numbers):
    with pytest.raises(ValueError, match="must be > 0, latency >= 0"):
        KVLink(*numbers)


def test_each_kind_needs_a_replica():
    router = create_router("round_robin")
    with pytest.raises(ValueError, match="1 prefill and 0 decode engines"):
        Disaggregated([make()], [], router, router, LINK)
