"""The simulated executor: virtual time under the unchanged engine, and no host time in it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, Executor
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.executors.simulated import SimulatedExecutor
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.cost_model import StepTime
from research_engine.simulation.streamed_records import StreamedRecords

ROOT = Path(__file__).parents[2]


class PerToken:
    """10 ms and 1 ms a token."""

    def seconds(self, batch: Batch) -> float:
        return 0.01 + 0.001 * batch.num_tokens


def make(records=None, **sizes) -> Engine:
    config = EngineConfig(**{"num_blocks": 64, "block_size": 4, "max_model_len": 128, "check_integrity": True, **sizes})
    return simulated_engine(config, schedulers.create("chunked_prefill"), PerToken(), records=records)


def arrivals(count: int = 20) -> list[Arrival]:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    return [Arrival(0.02 * i, str(i), range(100 * i, 100 * i + 5 + i), sampling) for i in range(count)]


def test_it_is_an_executor():
    assert isinstance(SimulatedExecutor(PerToken(), VirtualClock()), Executor)


def test_a_request_takes_the_sum_of_its_steps():
    engine = make()
    replay(engine, [Arrival(3.0, "a", range(7), SamplingParams(max_tokens=3, ignore_eos=True))])
    (record,) = engine.records.requests
    assert record.first_token_time == pytest.approx(3.0 + 0.017)
    assert record.last_token_time == pytest.approx(3.0 + 0.017 + 2 * 0.011)
    assert (record.finish_reason, record.output_tokens) == ("length", 3)


def test_a_slow_host_changes_nothing(monkeypatch):
    quick, slow = make(), make()
    step = slow.kv_cache.commit
    monkeypatch.setattr(slow.kv_cache, "commit", lambda *args: (time.sleep(0.0005), step(*args))[1])
    for engine in (quick, slow):
        replay(engine, arrivals())
    assert quick.records == slow.records


def test_every_request_gets_the_length_it_was_given_whatever_ends_it_otherwise():
    engine = make(eos_token_ids=(0, 1))
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(2,))
    request = engine.add_request("a", range(5), sampling)[0]
    while engine.has_unfinished:
        engine.step()
    assert (request.finish_reason, request.num_output_tokens) == ("length", 9)
    assert request.output_token_ids == [3] * 9


def test_preemption_and_swapping_need_nothing_of_the_executor():
    engine = make(num_blocks=12, num_host_blocks=12)
    engine._policy.scheduler = schedulers.create("chunked_prefill", preemption="swap")
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    replay(engine, [Arrival(0.0, str(i), range(100 * i, 100 * i + 5), sampling) for i in range(4)])
    assert sum(step.blocks_swapped_out for step in engine.records.steps) > 0
    assert {record.finish_reason for record in engine.records.requests} == {"length"}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_what_only_computing_can_tell_is_refused(name):
    engine = make()
    engine.add_request("a", range(5), SamplingParams(**{name: 1}))
    with pytest.raises(ValueError, match=f"'a': {name} = 1"):
        engine.step()


def test_after_shutdown_it_refuses_work():
    engine = make()
    engine.executor.shutdown()
    engine.add_request("a", range(5), SamplingParams())
    with pytest.raises(RuntimeError, match="shut down"):
        engine.step()


class HostAndDevice:
    """10 ms of the device and `host` seconds of the host a step."""

    def __init__(self, host: float) -> None:
        self.host = host

    def seconds(self, batch: Batch) -> float:
        return self.step_time(batch).total

    def step_time(self, batch: Batch) -> StepTime:
        return StepTime(self.host, 0.0, 0.01, 0.0)


@pytest.mark.parametrize(("overlap", "host", "step"), [(False, 0.004, 0.014), (True, 0.004, 0.01), (True, 0.03, 0.029)])
def test_an_engine_that_runs_ahead_hides_the_shorter_of_host_and_device_time(overlap, host, step):
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=128, overlap=overlap)
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), HostAndDevice(host))
    replay(engine, [Arrival(0.0, "a", range(7), SamplingParams(max_tokens=21, ignore_eos=True))])
    (record,) = engine.records.requests
    # the last token needs no host time before it: (19 x 30 ms + 10 ms) / 20
    assert (record.last_token_time - record.first_token_time) / 20 == pytest.approx(step)


class Fixed:
    """The same time for every step."""

    def __init__(self, *seconds: float) -> None:
        self.time = StepTime(*seconds)

    def seconds(self, batch: Batch) -> float:
        return self.time.total

    def step_time(self, batch: Batch) -> StepTime:
        return self.time


def test_launching_a_step_delays_the_tokens_of_the_step_before_it():
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=128, overlap=True)
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), Fixed(0.001, 0.02, 0.005, 0.002))
    replay(engine, [Arrival(0.0, "a", range(7), SamplingParams(max_tokens=4, ignore_eos=True))])
    times = [step.executed for step in engine.records.steps]
    # each result is looked for when the next step has been launched; the last one when nothing is left to launch
    assert times == pytest.approx([0.042, 0.065, 0.088, 0.09])


def test_what_the_host_does_once_the_tokens_are_out_delays_the_next_step_and_not_the_tokens():
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=128)
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), Fixed(0.001, 0.0, 0.01, 0.004))
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    replay(engine, [Arrival(0.0, "a", range(7), sampling), Arrival(0.013, "b", range(50, 57), sampling)])
    first, second = engine.records.steps[:2]
    assert (first.executed, first.finished, second.started) == pytest.approx((0.011, 0.015, 0.015))
    assert second.request_ids == ["a", "b"]  # which came while the host was busy, and is seen when it looks again


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_a_step_that_takes_no_possible_time_is_refused(seconds):
    engine = make()
    engine.executor._cost_model.seconds = lambda batch: seconds
    engine.add_request("a", range(5), SamplingParams())
    with pytest.raises(ValueError, match="the cost model says"):
        engine.step()


def test_streamed_records_have_the_totals_of_the_records_they_do_not_keep():
    kept, streamed, seen = make(), make(StreamedRecords()), []
    streamed.records._on_step = seen.append
    for engine in (kept, streamed):
        replay(engine, arrivals())
    steps, totals = kept.records.steps, streamed.records
    assert streamed.records.requests == kept.records.requests
    assert seen == steps
    assert totals.steps == []
    assert totals.num_steps == len(steps)
    assert totals.num_rows == sum(len(step.request_ids) for step in steps)
    assert totals.num_tokens == sum(sum(step.num_tokens) for step in steps)
    assert totals.num_drawn == 20 * 6
    assert totals.busy_seconds == pytest.approx(sum(step.finished - step.started for step in steps))
    assert totals.most_blocks_used == max(step.blocks_used for step in steps)


def test_torch_is_not_imported():
    script = (
        "import sys; import research_engine.bench.simulate as bench\n"
        "bench.run(bench.SimulateOptions(requests=3))\n"
        "import research_engine.simulation.fit, research_engine.simulation.llmservingsim\n"
        "import research_engine.simulation.replay\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_speed_bench_accounts_for_all_of_its_time():
    from research_engine.bench.simulate import SimulateOptions, run

    report = run(SimulateOptions(requests=20, parts=True))
    assert sum(report.parts.values()) == pytest.approx(1.0)
    assert report.parts["update"] > 0
    assert run(SimulateOptions(requests=3)).parts == {}
