"""Arrival processes: their rates over time, ServeGen's clients, conversations and closed loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from experiments.workloads import WorkloadSettings, build_workload
from experiments.workloads.arrivals import ArrivalSettings, arrival_times
from experiments.workloads.follow_ups import FollowUp
from experiments.workloads.samples import WorkloadError
from experiments.workloads.servegen import read_client, superpose
from research_engine.engine.driver import replay
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_config import load


def times(count: int, **settings: Any) -> np.ndarray:
    return np.array(arrival_times(ArrivalSettings(**settings), count, np.random.default_rng(0)).times)


def rate(arrived: np.ndarray, low: float, high: float) -> float:
    return float(((arrived >= low) & (arrived < high)).sum() / (high - low))


def test_on_and_off_take_turns_and_keep_the_mean_rate() -> None:
    arrived = times(30_000, process="on_off", rate=10.0, on=5.0, off=15.0)
    phase = arrived % 20.0
    assert phase.max() <= 5.0 + 1e-9
    assert len(arrived) / arrived[-1] == pytest.approx(10.0, rel=0.03)


def test_a_ramp_rises_to_its_end_and_stays() -> None:
    arrived = times(20_000, process="ramp", rate=10.0, end_rate=50.0, duration=200.0)
    assert rate(arrived, 0, 20) == pytest.approx(12.0, rel=0.2)
    assert rate(arrived, 90, 110) == pytest.approx(30.0, rel=0.15)
    assert rate(arrived, 200, 300) == pytest.approx(50.0, rel=0.06)
    falling = times(7_000, process="ramp", rate=50.0, end_rate=10.0, duration=200.0)
    assert rate(falling, 180, 200) == pytest.approx(12.0, rel=0.25)
    assert np.all(np.diff(falling) >= 0)


def test_a_day_rises_and_falls() -> None:
    arrived = times(40_000, process="diurnal", rate=20.0, amplitude=0.8, period=100.0)
    phase = arrived % 100.0
    whole = arrived[-1] // 100
    assert ((phase > 20) & (phase < 30)).sum() / (10 * whole) == pytest.approx(36.0, rel=0.1)
    assert ((phase > 70) & (phase < 80)).sum() / (10 * whole) == pytest.approx(4.0, rel=0.25)
    assert len(arrived) / arrived[-1] == pytest.approx(20.0, rel=0.03)


def test_a_parameter_of_another_process_is_refused() -> None:
    with pytest.raises(ValidationError, match="process 'ramp' needs a end_rate"):
        ArrivalSettings(process="ramp", rate=1.0)
    with pytest.raises(ValidationError, match="process 'closed_loop' takes no rate"):
        ArrivalSettings(process="closed_loop", concurrency=2, rate=1.0)


def client_file(folder: Path, name: str, rows: str) -> Path:
    path = folder / f"{name}-trace.csv"
    path.write_text(rows)
    return path


def test_clients_of_servegen_keep_rate_and_burstiness_of_each_window(tmp_path: Path) -> None:
    calm = client_file(tmp_path, "chunk-1", "0,5,1,Gamma,1.0,0.2\n600,20,1,Gamma,1.0,0.05\n")
    bursty = client_file(tmp_path, "chunk-2", "0,5,2.2,Weibull,0.5,9.9\n600,0,0,,,\n")
    moments, names = superpose([read_client(calm), read_client(bursty)], 20_000, np.random.default_rng(0), 0.0, None)
    arrived, who = np.array(moments), np.array(names)
    assert np.all(np.diff(arrived) >= 0)
    one, two = arrived[who == "chunk-1"], arrived[who == "chunk-2"]
    assert rate(one, 0, 600) == pytest.approx(5.0, rel=0.1)
    assert rate(one, 600, 1200) == pytest.approx(20.0, rel=0.1)
    assert rate(two, 0, 600) == pytest.approx(5.0, rel=0.25)
    assert rate(two, 600, 1200) == 0.0
    gaps = np.diff(two[two < 600])
    assert gaps.std() / gaps.mean() == pytest.approx(5**0.5, rel=0.2)  # of a Weibull of shape 0.5


@pytest.mark.parametrize(
    "rows",
    [
        "600,5,1,Gamma,1,1\n600,5,1,Gamma,1,1\n",
        "600,5,1,Gamma,1,1\n0,5,1,Gamma,1,1\n",
        "0,inf,1,Gamma,1,1\n600,5,1,Gamma,1,1\n",
    ],
)
def test_a_client_whose_windows_do_not_follow_each_other_is_refused(rows: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="its windows' starts must rise and rates must be numbers"):
        read_client(client_file(tmp_path, "chunk-3", rows))


def test_servegens_rate_is_scaled_and_its_clients_reach_the_requests(tmp_path: Path) -> None:
    files = [str(client_file(tmp_path, f"chunk-{i}", f"0,{i},1,Gamma,1,1\n600,{i},1,Gamma,1,1\n")) for i in (1, 3)]
    settings = WorkloadSettings(num_requests=400, lengths={"source": "fixed", "prompt": 2, "output": 1},
                                arrivals={"process": "servegen", "clients": files, "rate": 40.0})  # fmt: skip
    made = build_workload(settings, 0, vocab_size=9).arrivals
    assert len(made) / made[-1].time == pytest.approx(40.0, rel=0.15)
    assert [a.client for a in made].count("chunk-3") == pytest.approx(300, abs=40)
    assert [path.name for path in settings.files()] == ["chunk-1-trace.csv", "chunk-3-trace.csv"]


@pytest.mark.parametrize(
    ("rows", "told"),
    [("0,5,1,Pareto,1,1\n600,5,1,Gamma,1,1\n", "record 1: .* must be Gamma or Weibull"), ("0,5\n", "no client"),
     ("0,1,1,Gamma,1,1\n", "has 1 windows, at least 2")],
)  # fmt: skip
def test_a_file_that_is_no_client_is_named(tmp_path: Path, rows: str, told: str) -> None:
    with pytest.raises(WorkloadError, match=told):
        read_client(client_file(tmp_path, "x", rows))


# What follows what.


def served(**workload: Any) -> tuple[list[Any], Any]:
    """Request records by id, and the workload."""
    settings = load(workload={"lengths": {"source": "fixed", "prompt": 16, "output": 4}, **workload})
    made = build_workload(settings.workload, 0, vocab_size=100)
    engine = StubBackend().engine(settings, 0)
    follow_up = None if made.follow_ups is None else made.follow_ups.begin()
    replay(engine, made.arrivals, follow_up=follow_up)
    return sorted(engine.records.requests, key=lambda r: r.request_id), made


def test_a_closed_loop_keeps_as_many_requests_in_the_system_and_serves_all() -> None:
    records, made = served(num_requests=10, arrivals={"process": "closed_loop", "concurrency": 3, "think_time": 0.25})
    assert len(made.arrivals) == 3
    assert made.statistics["loop"] == "closed loop, 3 at once"
    assert [r.request_id for r in records] == [f"request-{i:04d}" for i in range(10)]
    ends = sorted(r.finish_time for r in records)
    starts = sorted(r.arrival_time for r in records)[3:]
    assert starts == pytest.approx([end + 0.25 for end in ends[:7]])


def test_a_turn_comes_after_the_answer_with_the_whole_conversation_as_its_prompt() -> None:
    records, made = served(num_requests=7, conversations={"turns": [3, 3], "think_time": 1.0},
                           arrivals={"process": "constant", "rate": 1.0}, clients={"a": 0.5, "b": 0.5})  # fmt: skip
    assert [r.prompt_tokens for r in records] == [16, 36, 56, 16, 36, 56, 16]
    assert made.statistics["longest_total"] == 60
    assert made.statistics["prompt_tokens"] == sum(r.prompt_tokens for r in records)
    for before, after in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert records[after].arrival_time > records[before].finish_time
        assert records[after].client == records[before].client
        assert records[after].cached_tokens == 16 * (1 if before in (0, 3) else 2)  # the prefix cache knows the rest


def test_a_refused_request_lets_the_closed_loop_go_on() -> None:
    settings = WorkloadSettings(num_requests=3, lengths={"source": "fixed", "prompt": 4, "output": 2},
                                arrivals={"process": "closed_loop", "concurrency": 1})  # fmt: skip
    plan = build_workload(settings, 0, vocab_size=9).follow_ups
    assert plan is not None
    follow_up = FollowUp(plan)
    (second,) = follow_up(build_workload(settings, 0, vocab_size=9).arrivals[0], (), 2.0)
    assert (second.request_id, second.time) == ("request-0001", 2.0)


def test_shared_prefixes_come_on_top_and_are_shared_by_zipfs_law() -> None:
    settings = WorkloadSettings(num_requests=500, lengths={"source": "fixed", "prompt": 4, "output": 2},
                                shared_prefixes={"count": 3, "tokens": 32, "exponent": 1.0})  # fmt: skip
    prompts = [tuple(a.prompt_token_ids) for a in build_workload(settings, 0, vocab_size=1000).arrivals]
    assert {len(prompt) for prompt in prompts} == {36}
    counts = sorted(([p[:32] for p in prompts].count(prefix) for prefix in {p[:32] for p in prompts}), reverse=True)
    assert counts == pytest.approx([272, 136, 91], abs=35)


def test_zipf_lengths_favour_short_ones() -> None:
    settings = WorkloadSettings(
        num_requests=4000, lengths={"source": "zipf", "prompt": [10, 1000], "output": [1, 2], "exponent": 1.0}
    )
    made = build_workload(settings, 0, vocab_size=9).arrivals
    prompts = np.array([len(a.prompt_token_ids) for a in made])
    assert (prompts.min(), prompts.max() <= 1000) == (10, True)
    assert np.median(prompts) == pytest.approx(100, rel=0.1)  # the geometric mean of the bounds, for exponent 1
    assert [a.sampling.max_tokens for a in made].count(1) == pytest.approx(2667, abs=120)
