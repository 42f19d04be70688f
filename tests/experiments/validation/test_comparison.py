"""A simulation with the very costs of the recorded engine has no error; a wrong one has the error it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.run import main as run_main
from experiments.validation.comparison import LATENCIES, POINTS, compare, compare_run, rank_agreement
from experiments.validation.recorded import available_recordings
from experiments.validation.recording import Recording
from experiments.validation.report import markdown, verdict
from research_engine.simulation.curve import Curve
from research_engine.simulation.host_cost import HostCost
from tests.experiments.validation.runs import PROFILE, recording

EVERY = ["throughput", *(f"{name}.{point}" for name in LATENCIES for point in POINTS)]


@pytest.mark.parametrize("overlap", [False, True])
def test_with_the_true_costs_there_is_no_error(overlap):
    own = recording(overlap=overlap)
    for found in compare(own, PROFILE):
        assert {metric: found.error(metric) for metric in EVERY} == pytest.approx(dict.fromkeys(EVERY, 0.0), abs=1e-9)
        assert found.forced["mape"] == pytest.approx(0.0, abs=1e-9)


def test_decisions_are_those_of_the_recorded_run():
    own = recording()
    for run in own.runs:
        assert compare_run(own, run, PROFILE).num_steps == len(run.steps)


def test_a_profile_that_is_ten_percent_slow_is_told_so_step_by_step():
    slow = replace(
        PROFILE, dense=Curve((x, 1.1 * y) for x, y in PROFILE.dense.points),
        head=Curve((x, 1.1 * y) for x, y in PROFILE.head.points),
        host=HostCost(schedule=(0.00066, 0.00011), after=(0.00044, 0.0)),
        attention=replace(PROFILE.attention, per_token=1.1e-6, prefill={(1, 0): 1.1e-7}),
    )  # fmt: skip
    own = recording()
    found = compare_run(own, own.runs[0], slow)
    assert (found.forced["mape"], found.forced["bias"], found.forced["total_bias"]) == pytest.approx((0.1, 0.1, 0.1))
    assert found.error("tpot.p50") > 0.09
    assert found.error("e2e.p99") > 0.09


def test_ranks_are_counted_pair_by_pair():
    own = recording()
    agreement = rank_agreement(compare(own, PROFILE))
    assert [ranks.load for ranks in agreement] == [0.5, 0.8, 0.95]
    for ranks in agreement:
        assert ranks.pairs == (3 - len(ranks.same)) * 2 * len(LATENCIES)
        assert ranks.alike == ranks.pairs
        assert ranks.swapped == ()
    assert agreement[-1].same == ()


def test_policies_that_decide_alike_have_no_ranks_and_show_the_noise():
    own = recording()
    runs = [run for run in own.runs if run.load == 0.5 and run.scheduler in ("fcfs", "chunked_prefill")]
    late = [replace(r, last_token_time=r.arrival_time + 1.1 * (r.last_token_time - r.arrival_time))
            for r in runs[1].requests]  # fmt: skip
    found = compare(replace(own, runs=[runs[0], replace(runs[1], requests=late)]), PROFILE)
    (ranks,) = rank_agreement(found)
    assert ranks.pairs == 0
    ((one, other, apart, metric),) = ranks.same
    assert (one, other) == ("fcfs", "chunked_prefill")
    assert apart > 0.05
    assert metric.startswith(("E2E", "TPOT"))
    assert any("decide alike in the simulation" in line for line in markdown(own, PROFILE, found))


def test_a_swapped_pair_is_named():
    found = compare(recording(), PROFILE)
    one, other = (item for item in found if item.run.load == 0.95 and item.run.scheduler in ("fcfs", "sjf"))
    swapped = [replace(one, simulated_metrics=other.simulated_metrics),
               replace(other, simulated_metrics=one.simulated_metrics)]  # fmt: skip
    (ranks,) = rank_agreement(swapped)
    assert ranks.clear_alike == 0
    assert ranks.clear_pairs == len(ranks.swapped) > 0
    assert "fcfs / sjf" in ranks.swapped[0]


def test_the_table_has_a_row_a_run_and_says_what_speaks_against_it():
    own = recording()
    own.runs[0] = replace(own.runs[0], disturbed=0.4)
    found = compare(own, PROFILE)
    lines = markdown(own, PROFILE, found)
    assert sum(line.startswith(("| fcfs", "| sjf", "| chunked")) for line in lines) == 9
    assert verdict(found[0]) == "disturbed 40%"
    assert any("more than 2 % apart" in line for line in lines)


def test_chance_is_told_beside_the_error_where_the_profile_knows_its_own():
    own, profile = recording(), replace(PROFILE, held_out={"steps": 100, "mape": 0.05, "bias": 0.0, "total_bias": 0.0})
    own = replace(own, runs=own.runs[:2])
    found = compare(own, profile)
    assert [item.by_chance for item in found] == [item.by_chance for item in compare(own, profile)]  # the same draws
    for item in found:
        least, most = item.by_chance["ttft.p99"]
        assert least < most and item.error("ttft.p99") == pytest.approx(0.0, abs=1e-9)
        assert -0.2 < item.by_chance["e2e.p50"][0] < 0.0 < item.by_chance["e2e.p50"][1] < 0.2
    assert all(item.by_chance == {} for item in compare(own, PROFILE))
    for none in (0.0, float("nan"), 50.0):  # an error that is no measure of chance
        unknown = replace(profile, held_out={**profile.held_out, "mape": none})
        assert compare_run(own, own.runs[0], unknown).by_chance == {}
    lines = markdown(own, profile, found)
    row = next(line for line in lines if line.startswith("| fcfs"))
    assert f"| {found[0].by_chance['ttft.p99'][0]:+.1%} to {found[0].by_chance['ttft.p99'][1]:+.1%} |" in row
    assert any("standard deviation of 5.0%" in line for line in lines)
    assert any(line.startswith("Within 5%: 12 of 12 latencies.") for line in lines)


def test_latencies_beyond_the_bar_are_named_with_their_chance():
    own = recording()
    own = replace(own, runs=own.runs[:1])
    late = [replace(r, first_token_time=r.arrival_time + 0.8 * (r.first_token_time - r.arrival_time))
            for r in own.runs[0].requests]  # fmt: skip
    own = replace(own, runs=[replace(own.runs[0], requests=late)])
    (line,) = (line for line in markdown(own, PROFILE, compare(own, PROFILE)) if line.startswith("Within 5%"))
    assert "TTFT.P99 of fcfs at 50% (+25.0%)" in line and "E2E" not in line


def test_a_profile_of_a_busy_machine_is_told_below_the_table():
    own = recording()
    busy = replace(PROFILE, conditions={"cores": 0.5})
    warned = [line for line in markdown(own, busy, compare(own, busy)) if line.startswith("WARNING")]
    assert warned == ["WARNING: the profile was measured on a busy machine: other processes took 50% of the cores.  "]
    assert not any(line.startswith("WARNING") for line in markdown(own, PROFILE, compare(own, PROFILE)))


def test_the_table_is_made_from_a_recording_alone(tmp_path, capsys):
    recording().save(tmp_path / "r")
    PROFILE.save(tmp_path / "r" / "profile.json")
    assert run_main(["sim_vs_real", f"recording={tmp_path / 'r'}", "--out", str(tmp_path / "out")]) == 0
    made = {path.name for path in (tmp_path / "out" / "r").iterdir()}
    assert made == {"table.md", "table.csv", "table.tex", "latency.png", "latency.pdf", "steps.png", "steps.pdf"}
    assert "| fcfs | 50% | " in capsys.readouterr().out


def test_a_dry_run_says_what_would_be_simulated_and_makes_nothing(tmp_path, monkeypatch, capsys):
    recording().save(tmp_path / "r")
    PROFILE.save(tmp_path / "r" / "profile.json")
    monkeypatch.setattr("experiments.validation.recorded.compare", None)
    assert run_main(["sim_vs_real", f"recording={tmp_path / 'r'}", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    plan, cost = capsys.readouterr().out.splitlines()
    assert plan.startswith("to make   r: simulates 9 recorded runs of m, 360 requests in ")
    assert cost.startswith("1 table to make, about ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["recordings=x"], "unknown setting 'recordings'"), (["recording=nowhere"], "nowhere: no recording"),
     (["profile=nowhere.json"], "nowhere.json")],
)  # fmt: skip
def test_a_users_mistake_ends_with_code_2(words, rule, tmp_path, capsys):
    assert run_main(["sim_vs_real", *words, "--out", str(tmp_path)]) == 2
    assert rule in capsys.readouterr().err


def test_the_list_names_it(capsys):
    assert run_main(["--list"]) == 0
    assert "sim_vs_real" in capsys.readouterr().out


@pytest.mark.parametrize("directory", available_recordings(), ids=lambda path: path.name)
def test_a_shipped_recording_is_small_and_whole(directory):
    assert sum(file.stat().st_size for file in directory.iterdir()) < 400_000
    shipped = Recording.load(directory)
    assert len({run.load for run in shipped.runs}) >= 3
    assert all(run.steps and run.requests for run in shipped.runs)
