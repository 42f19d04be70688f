"""Results of runs written down by hand: the definitions of docs/metrics.md, and when a run may not be believed."""

from __future__ import annotations

import math

import pytest

from research_engine.bench.backends import Observation
from research_engine.bench.datasets import Sample
from research_engine.bench.load import Load, LoadRun
from research_engine.bench.serve_result import latency_growth, serve_result
from research_engine.metrics import SLO

SAMPLE = Sample("hi", 3, 4)


def answered(scheduled=0.0, *times, sent=None, tokens=None, error=None, **more) -> Observation:
    return Observation(
        SAMPLE,
        scheduled,
        sent=scheduled if sent is None else sent,
        times=list(times),
        finished=times[-1] if times else scheduled + 1,
        finish_reason="length",
        prompt_tokens=3,
        output_tokens=len(times) if tokens is None else tokens,
        error=error,
        **more,
    )


def result_of(observations, *, arrivals=True, slo=None, streamed=True, percentiles=(50, 99), **more):
    times = [seen.scheduled for seen in observations] if arrivals else None
    load = Load([SAMPLE] * len(observations), [b""] * len(observations), times, streamed, **more.pop("load", {}))
    end = max((seen.finished for seen in observations if seen.finished is not None), default=0.0)
    run = LoadRun(list(observations), 0.0, end, **more)
    return serve_result(load, run, slo=slo, names=("ttft", "tpot", "itl", "e2el"), percentiles=percentiles)


def test_latency_counts_from_the_scheduled_time_not_from_the_sending():
    result = result_of([answered(1.0, 1.5, 1.7, sent=1.4)])
    assert result["mean_ttft_ms"] == pytest.approx(500)
    assert result["mean_e2el_ms"] == pytest.approx(700)
    assert result["mean_tpot_ms"] == pytest.approx(200)
    assert result["client"]["late_send_max_ms"] == pytest.approx(400)


def test_itl_is_pooled_and_has_zeros_for_tokens_that_came_together():
    result = result_of([answered(0.0, 1.0, 2.0, tokens=4), answered(0.0, 1.0, 1.5)])
    assert sorted(gap for own in result["itls"] for gap in own) == [0.0, 0.0, 0.5, 1.0]
    assert result["mean_tpot_ms"] == pytest.approx((1000 / 3 + 500) / 2)
    assert result["total_output_tokens"] == 6


def test_rates_count_completed_requests_over_the_whole_duration():
    result = result_of([answered(0.0, 1.0, 2.0), answered(0.0, 4.0), answered(0.0, 3.0, error="cut")])
    assert (result["completed"], result["failed"], result["duration"]) == (2, 1, 4.0)
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 0.75
    assert result["total_token_throughput"] == (3 + 6) / 4


def test_failed_requests_stay_in_the_denominator_of_attainment_and_out_of_latencies():
    good, slow = answered(0.0, 0.1, 0.2), answered(0.0, 5.0, 5.1)
    failed = answered(0.0, 0.1, error="HTTP 500: boom")
    result = result_of([good, slow, failed, failed], slo=SLO(ttft=1.0))
    assert result["slo_attainment"] == 0.25
    assert result["request_goodput"] == pytest.approx(1 / 5.1)
    assert result["mean_ttft_ms"] == pytest.approx(2550)
    assert result["errors"] == ["", "", "HTTP 500: boom", "HTTP 500: boom"]
    assert result["ttfts"][2:] == [0.0, 0.0] and result["output_lens"][2:] == [0, 0]


def test_a_request_of_one_token_has_no_tpot():
    result = result_of([answered(0.0, 1.0)])
    assert math.isnan(result["mean_tpot_ms"]) and result["mean_ttft_ms"] == pytest.approx(1000)


def test_percentiles_are_linear_between_order_statistics_under_vllms_keys():
    result = result_of([answered(0.0, float(second)) for second in (1, 2, 3, 4)], percentiles=(25, 99.9))
    assert result["p25_ttft_ms"] == pytest.approx(1750)
    assert result["p99.9_ttft_ms"] == pytest.approx(3997)
    assert result["median_ttft_ms"] == pytest.approx(2500)
    assert result["std_ttft_ms"] == pytest.approx(1118.034)


def test_answers_in_one_piece_have_an_end_to_end_latency_alone():
    whole = Observation(SAMPLE, 0.0, 0.0, finished=2.0, finish_reason="stop", prompt_tokens=3, output_tokens=9)
    result = result_of([whole], streamed=False)
    assert result["mean_e2el_ms"] == pytest.approx(2000) and math.isnan(result["mean_ttft_ms"])
    assert result["total_output_tokens"] == 9


def test_peaks():
    result = result_of([answered(0.0, 0.5, 1.2, 1.4), answered(0.1, 1.3, 1.35, tokens=5), answered(1.4, 2.5)])
    assert result["max_output_tokens_per_s"] == 7.0
    assert result["max_concurrent_requests"] == 2  # the third begins as the first ends


def test_a_load_that_the_client_sent_late_is_void():
    on_time = [answered(float(second), second + 0.5) for second in range(10)]
    assert result_of(on_time)["void"] == []
    late = [answered(float(second), second + 0.9, sent=second + 0.02 * second) for second in range(10)]
    (reason,) = result_of(late)["void"]
    assert reason == "the client sent late: 1.00 req/s were to be sent, 0.98 were"


def test_a_load_held_back_by_max_concurrency_is_void_and_says_so():
    waiting = [answered(float(second), 1.9 * (second + 1), sent=1.9 * second) for second in range(10)]
    (reason,) = result_of(waiting, load={"max_concurrency": 1})["void"]
    assert reason.startswith("requests waited for max_concurrency: 1.00 req/s")


def test_a_closed_loop_has_no_rate_to_be_off_from():
    result = result_of([answered(0.0, 1.0), answered(0.0, 2.0)], arrivals=False)
    assert (result["planned_send_rate"], result["void"], result["unstable"]) == ("inf", [], False)


@pytest.mark.parametrize("overload", [1.0, 1.5, 3.0])
def test_a_server_that_falls_behind_is_unstable_and_its_latency_grows_by_what_it_lacks(overload):
    """One request a second is offered, and a request takes `overload` seconds, one after the other."""
    seen = [answered(float(i), (i + 1) * overload) for i in range(200)]
    result = result_of(seen)
    assert result["unstable"] == (overload > 1)
    assert result["latency_growth"] == pytest.approx(overload - 1)


def test_latency_that_only_varies_does_not_grow():
    seen = [answered(float(i), i + 1 + 0.5 * (i * 7919 % 13) / 13) for i in range(200)]
    assert latency_growth(seen) == 0.0
    assert latency_growth(seen[:3]) == 0.0
    assert latency_growth([answered(1.0, 2.0)] * 30) == 0.0


def test_a_busy_client_and_a_lagging_loop_are_told():
    seen = [answered(0.0, 10.0)]
    assert result_of(seen, cpu_seconds=5.0)["warnings"] == []
    assert "95% of a core" in result_of(seen, cpu_seconds=9.5)["warnings"][0]
    assert "50 ms late" in result_of(seen, loop_lags=[0.05] * 100)["warnings"][0]


def test_tokens_counted_by_the_client_are_told():
    uncounted = Observation(SAMPLE, 0.0, 0.0, times=[1.0, 2.0], finished=2.0, finish_reason="stop")
    result = result_of([uncounted])
    assert "no usage" in result["warnings"][0]
    assert (result["total_output_tokens"], result["total_input_tokens"]) == (2, 3)


def test_requests_under_way_at_an_interruption_neither_completed_nor_failed():
    under_way = Observation(SAMPLE, 0.0, 0.0, times=[1.0])
    result = result_of([answered(0.0, 1.0), under_way], is_interrupted=True, slo=SLO(ttft=9.0))
    assert (result["completed"], result["failed"], result["unfinished"]) == (1, 0, 1)
    assert result["interrupted"] and result["errors"][1] == "unfinished"
    assert result["slo_attainment"] == 1.0
