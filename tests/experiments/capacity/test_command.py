"""The whole command on a small model, and its refusals."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from experiments.analysis.statistics import Interval
from experiments.capacity.command import CapacityOptions, main, make_system, runs_table, verdict
from experiments.capacity.search import Capacity
from experiments.capacity.system import Layout, Load, RunLimits
from research_engine.cli import main as cli
from research_engine.metrics import QueueTrend
from research_engine.simulation.build import PROFILES
from research_engine.simulation.profiled import Profile

SMALL = {"lengths": "{source: fixed, prompt: 200, output: 20}", "requests": 60, "seeds": 2, "max_num_seqs": 8}


def options(**changes) -> CapacityOptions:
    return CapacityOptions("dummy:llama3-8b", **{"ttft": 0.2, "tolerance": 0.1, **SMALL, **changes})


def test_the_capacity_meets_the_limits_and_a_third_more_does_not(tmp_path, capsys):
    own = options(out=tmp_path / "found.json")
    assert main(own) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    rate = found["capacity"]["by_seed"]["0"]
    system = make_system(own)
    assert system.load(rate, 0).meets(0.9)
    assert not system.load(1.34 * rate, 0).meets(0.9)
    shown = capsys.readouterr().out
    assert "for 90% of the requests with TTFT <= 0.2 s" in shown
    assert "95 % interval over 2 seeds" in shown


def test_far_beyond_capacity_the_queue_is_told_to_grow_by_what_is_not_served():
    system = make_system(options(requests=400))
    most = system.most(0)
    load = system.load(2 * most, 0)
    assert load.trend.growth == pytest.approx(most, rel=0.25)
    assert verdict(load, 0.9).startswith("unstable: queue +")


def test_eighty_columns_hold_the_table_of_an_overloaded_system_whole():
    trend = QueueTrend(True, 1234.56)
    slow = {"p50": 104.25, "p99": 3599.123}
    load = Load(12345.67, 0.123, trend, {"ttft": slow, "tpot": {"p50": 0.04, "p99": 12.3456}}, 1234567.0, 1.0)
    own = options()
    found = Capacity(Interval(1.0, 1.0, 1.0), {0: 1.0}, {0: [load]})
    buffer = io.StringIO()
    Console(file=buffer, width=80).print(runs_table(own, make_system(own), found))
    shown = buffer.getvalue()
    for word in ("sent", "req/s", "limits", "P99 ms", "tok/s", "busy", "verdict", "unstable:", "queue", "+1234.56/s"):
        assert word in shown
    for cell in ("12345.67", "12.3%", "104.250", "3599.123", "12345.6", "1234567", "100%"):
        assert cell in shown
    assert "\u2026" not in shown


def test_a_traffic_is_carried_by_that_many_gpus(capsys):
    system = make_system(options())
    traffic = 1.5 * system.most(0)
    assert main(options(traffic=traffic, seeds=1, tensor_parallel_size=1)) == 0
    assert "need 2 GPUs: 2 x 1" in capsys.readouterr().out.replace("\n", " ")


def test_prefill_apart_from_decode_is_a_layout_like_any_other():
    load = make_system(options(prefill=1, replicas=1)).load(2.0, 0)
    assert load.attainment == 1.0
    assert load.latencies["tpot"]["count"] == 60


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"ttft": None}, "no limit is given"), ({"attainment": 1.5}, "attainment = 1.5"), ({"seeds": 0}, "seeds = 0"),
     ({"traffic": -1.0}, "traffic = -1.0"), ({"tolerance": 2.0}, "tolerance = 2.0"),
     ({"link_ms": -1.0}, "link_ms = -1.0: must be milliseconds >= 0"), ({"link_gbytes": 0.0}, "link_gbytes = 0.0"),
     ({"link_ms": 1.0}, "used with prefill alone"), ({"ttft": -1.0}, "slo.ttft = -1.0"),
     ({"itl_p99": 0.0}, "itl_p99 = 0.0: must be seconds > 0")],
)  # fmt: skip
def test_wrong_numbers_are_refused(changes, rule):
    with pytest.raises(ValueError, match=rule):
        make_system(options(**changes))


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["--gpu", "h20"], "no GPU sheet 'h20'; there are h200"), (["--router", "random"], "no router 'random'"),
     (["--lengths", "{source: fixd}"], "lengths"), (["--lengths", "{"], "lengths"),
     (["--replicas", "0"], "replicas = 0"),
     (["--cost-model", "profiled:none.json"], "none.json"),
     (["--cost-model", "profiled:llama3-8b-h200"], "wanted 'dummy:tiny'; force_profile takes it all the same"),
     (["--scheduler", "fcsf"], "no scheduler 'fcsf'")],
)  # fmt: skip
def test_a_users_mistake_ends_with_code_2_and_the_valid_ones(words, rule, capsys):
    assert cli(["capacity", "dummy:tiny", "--ttft", "1", *words]) == 2
    assert rule in capsys.readouterr().err


def test_a_load_is_good_only_if_its_queue_stands():
    load = Load(1.0, 0.95, QueueTrend(False, 0.0), {}, 1.0, 0.5)
    assert (load.meets(0.9), load.meets(0.99)) == (True, False)
    assert not Load(1.0, 0.95, QueueTrend(True, 0.3), {}, 1.0, 0.5).meets(0.9)


def test_a_run_is_limited_as_a_whole_by_its_gaps_and_its_queue():
    limits = {"loose": {"itl_p99": 10.0}, "tight": {"itl_p99": 1e-6}, "queue": {"queueing_p50": 1e-9}}
    loads = {name: make_system(options(ttft=None, **limit)).load(8.0, 0) for name, limit in limits.items()}
    assert loads["loose"].meets(0.9)
    assert not loads["tight"].meets(0.9)
    assert not loads["queue"].meets(0.9)
    assert "itl" not in loads["queue"].latencies
    assert not loads["loose"].under(RunLimits(itl_p99=1e-6)).meets(0.9)


def test_gaps_are_those_between_a_requests_own_tokens():
    load = make_system(options(ttft=None, itl_p99=1.0)).load(2.0, 0)
    assert load.latencies["itl"]["count"] == 60 * 19
    assert load.latencies["itl"]["mean"] == pytest.approx(load.latencies["tpot"]["mean"])


def test_limits_on_a_run_are_told_beside_those_on_requests(capsys):
    assert main(options(itl_p99=0.5, queueing_p50=2.0, seeds=1, requests=20)) == 0
    shown = capsys.readouterr().out
    assert "for 90% of the requests with TTFT <= 0.2 s and ITL P99 <= 0.5 s, QUEUEING P50 <= 2 s" in shown


def test_a_profile_of_a_busy_machine_is_told_in_the_title(tmp_path):
    shipped = Profile.load(PROFILES / "llama3-8b-h200.json")
    replace(shipped, conditions={"cores": 0.43}).save(tmp_path / "busy.json")
    system = make_system(options(cost_model=f"profiled:{tmp_path / 'busy.json'}"))
    told = "simulated NVIDIA H200, profile of a busy machine (other processes took 43% of the cores)"
    assert system.machine == told


def test_kv_needs_a_link():
    with pytest.raises(ValueError, match="give link_bandwidth"):
        Layout(replicas=1, prefill=1)
