"""Sweeps: the search ends at the saturation point of a server whose limit is known, and everything it saw is kept."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from research_engine.bench.serve_options import ReportOptions, ServeBenchOptions, TrafficOptions
from research_engine.bench.sweep import (
    Bracket,
    Sweep,
    bracket_of,
    rows_of,
    run_sweep,
    saturation_line,
    saturation_search,
    sweep_rates,
    sweep_table,
    why_not,
)
from research_engine.cli import main
from tests.bench.standin import StandIn


def searched(start: float, tolerance: float, limit: float) -> list[float]:
    """Rates that the search tries against a server that sustains every rate up to `limit`."""
    tried, search = [], saturation_search(start, tolerance)
    rate = next(search)
    try:
        while True:
            tried.append(rate)
            rate = search.send(rate <= limit)
    except StopIteration:
        return tried


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(start=st.floats(0.5, 200), limit=st.floats(1.0, 100), tolerance=st.sampled_from([0.3, 0.1, 0.05]))
def test_the_search_closes_in_on_the_limit(start, limit, tolerance):
    tried = searched(start, tolerance, limit)
    low = max(rate for rate in tried if rate <= limit)
    high = min(rate for rate in tried if rate > limit)
    assert high / low <= 1 + tolerance + 0.02  # rates are rounded to three digits
    assert len(tried) == len(set(tried)) <= 20


@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_the_search_ends_where_there_is_no_limit(limit):
    assert len(searched(1.0, 0.1, limit)) == 20


class Server:
    """Gives results as a server with a limit would; counts what was asked of it."""

    def __init__(self, limit: float, interrupt_at: float | None = None) -> None:
        self.limit, self.interrupt_at, self.asked = limit, interrupt_at, []

    async def measure(self, traffic: TrafficOptions) -> dict:
        self.asked.append(traffic)
        rate = traffic.request_rate
        latencies = {f"{kind}_{name}_ms": 10.0 * (1 if rate <= self.limit else 50)
                     for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl")}  # fmt: skip
        return {
            "request_rate": "inf" if math.isinf(rate) else rate, "send_rate": rate, "void": [],
            "completed": traffic.num_prompts, "failed": 0, "unstable": False, "slo_attainment": None,
            "latency_growth": max(0.0, min(rate, 1e6) / self.limit - 1), "interrupted": rate == self.interrupt_at,
            "request_throughput": min(rate, self.limit), "output_throughput": 1.0, "request_goodput": None,
            "warnings": [], "errors": [], "label": "openai", "max_concurrency": None, "model_id": "m", "date": "d",
            **latencies,
        }  # fmt: skip


def options(**traffic) -> ServeBenchOptions:
    return ServeBenchOptions(traffic=TrafficOptions(num_prompts=100, **traffic))


def test_an_automatic_sweep_begins_from_the_throughput_of_all_at_once():
    server = Server(limit=40.0)
    sweep = asyncio.run(sweep_rates(server, options(sweep_rates="auto", num_warmups=5)))
    assert [math.isinf(traffic.request_rate) for traffic in server.asked[:2]] == [True, False]
    assert server.asked[1].request_rate == 20.0
    assert [traffic.num_warmups for traffic in server.asked[:2]] == [5, 0]
    low, high = sweep.saturation
    assert low <= 42 < high <= 1.12 * low  # a growth of 5 % is allowed


def test_rates_that_are_named_are_measured_in_order_for_the_time_asked():
    server = Server(limit=3.0)
    sweep = asyncio.run(sweep_rates(server, options(sweep_rates="4,1,2", sweep_duration=30.0)))
    assert [traffic.request_rate for traffic in server.asked] == [1.0, 2.0, 4.0]
    assert [traffic.num_prompts for traffic in server.asked] == [30, 60, 120]
    assert sweep.saturation == Bracket(2.0, 4.0)


def test_the_table_tells_what_was_sent_from_what_was_finished_and_fits_eighty_columns():
    report = ReportOptions(goodput=("ttft:500",), percentile_metrics="ttft,tpot,itl,e2el")
    chosen = ServeBenchOptions(traffic=TrafficOptions(num_prompts=100), report=report)
    server, runs = Server(limit=30.0), []
    for rate in (20.0, 12345.67):
        runs.append(asyncio.run(server.measure(TrafficOptions(request_rate=rate, num_prompts=100))))
        latencies = {f"{kind}_{name}_ms": 12345.0 for kind in ("median", "p99") for name in ("tpot", "e2el")}
        runs[-1] |= latencies | {"sustained": rate < 30, "why_not": [], "request_goodput": 1.0, "slo_attainment": 0.5}
    sweep = Sweep(runs, Bracket(20.0, 12345.67), False)
    assert [(row["sent req/s"], row["finished req/s"]) for row in rows_of(sweep, chosen)] == [(20, 20), (12345.67, 30)]
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(sweep_table(sweep, chosen))
    words = ("finished", "output", "limits", "TTFT", "sustained", "12346", "12345 /")
    assert all(word in buffer.getvalue() for word in words)
    assert "\u2026" not in buffer.getvalue()


def test_an_interrupted_sweep_keeps_what_it_has(capsys, tmp_path):
    chosen = ServeBenchOptions(
        traffic=TrafficOptions(sweep_rates="1,2,4"),
        report=ReportOptions(save_result=True, result_dir=str(tmp_path), result_filename="s.json"),
    )
    assert asyncio.run(run_sweep(Server(limit=9.0, interrupt_at=2.0), chosen)) == 130
    kept = json.loads((tmp_path / "s.json").read_text())
    assert kept["interrupted"] is True and [run["request_rate"] for run in kept["runs"]] == [1.0, 2.0]


def test_a_sustained_rate_above_one_that_is_not_had_luck():
    runs = [{"request_rate": rate, "sustained": good} for rate, good in ((1, True), (2, False), (3, True))]
    assert bracket_of([*runs, {"request_rate": "inf", "sustained": False}]) == Bracket(1, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"void": ["the client sent late: x"]}, "the client sent late: x"),
        ({"failed": 2}, "2 of 102 requests failed"),
        ({"unstable": True}, "the queue grew to the end"),
        ({"latency_growth": 0.2}, "latency grew by 0.20 s in each second"),
        ({"slo_attainment": 0.85}, "85% of the requests met the limits"),
        ({"interrupted": True}, "interrupted"),
        ({"completed": 0}, "no request ended"),
    ],
)
def test_why_a_rate_is_not_sustained(change, reason):
    fine = asyncio.run(Server(limit=9.0).measure(TrafficOptions(num_prompts=100, request_rate=1.0)))
    assert why_not(fine, 0.9) == []
    assert why_not(fine | {"failed": 1, "slo_attainment": 0.9, "latency_growth": 0.04}, 0.9) == []
    assert why_not(fine | change, 0.9) == [reason]


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (Bracket(1.0, 2.0), "1 req/s is sustained, 2 req/s is not"),
        (Bracket(None, 2.0), "below 2 req/s"),
        (Bracket(1.0, None), "above 1 req/s"),
        (Bracket(None, None), "not known"),
    ],
)
def test_the_finding_in_a_sentence(point, words):
    assert words in saturation_line(point)


def test_a_sweep_against_a_server_leaves_a_table_a_plot_and_every_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with StandIn() as server:
        code = main(["bench", "serve", "--base-url", server.url, "--num-prompts", "5", "--random-input-len", "8",
                     "--random-output-len", "4", "--sweep-rates", "50,100", "--goodput", "ttft:60000",
                     "--save-result", "--result-dir", str(tmp_path), "--disable-tqdm"])  # fmt: skip
    assert code == 0
    (path,) = tmp_path.glob("openai-sweep-dummy-tiny-*.json")
    whole = json.loads(path.read_text())
    assert [run["request_rate"] for run in whole["runs"]] == [50.0, 100.0] and "saturation" in whole
    rows = list(csv.DictReader(path.with_suffix(".csv").open()))
    assert [row["completed"] for row in rows] == ["5", "5"]
    assert "| rate |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "saturation point" in capsys.readouterr().out
    assert len({body["prompt"] for body in server.bodies}) == 10
