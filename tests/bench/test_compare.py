"""bench compare: changes against the first file, and every reason why they might not mean what they seem to."""

from __future__ import annotations

import json
import math

import pytest

from research_engine.bench.compare import change_of, read_results, remarks, server_differences
from research_engine.cli import main


def run(**changes) -> dict:
    plain = {
        "completed": 10,
        "failed": 0,
        "request_throughput": 2.0,
        "request_goodput": None,
        "output_throughput": 100.0,
        "mean_ttft_ms": 50.0,
        "num_prompts": 10,
        "request_rate": 4.0,
        "seed": 0,
        "backend": "openai",
    }
    return plain | {"void": [], "unstable": False, "interrupted": False} | changes


@pytest.fixture
def file(tmp_path):
    def write(name, *runs):
        path = tmp_path / name
        path.write_text("".join(json.dumps(one) + "\n" for one in runs))
        return str(path)

    return write


def test_changes_are_shown_against_the_first_file(file, capsys):
    names = [file("a.json", run()), file("b.json", run(request_throughput=2.5, mean_ttft_ms=40.0))]
    assert main(["bench", "compare", *names]) == 0
    lines = {words[0]: " ".join(words[1:]) for line in capsys.readouterr().out.splitlines() if (words := line.split())}
    assert lines["request_throughput"] == "2 2.5 +25.0 %"
    assert lines["mean_ttft_ms"] == "50 40 -20.0 %"
    assert "request_goodput" not in lines


def test_several_runs_a_side_give_an_interval():
    change = change_of([10.0, 11.0, 12.0], [20.0, 22.0, 24.0])
    assert change.percent == pytest.approx(100.0)
    # Welch: difference 11, standard error sqrt(1/3 + 4/3), 2.94 degrees of freedom, t = 3.2167
    assert (change.low, change.high) == pytest.approx((100 - 37.75, 100 + 37.75), abs=0.1)
    assert math.isnan(change_of([10.0], [20.0]).low) and change_of([10.0], [20.0]).percent == 100.0
    assert change_of([5.0, 5.0], [6.0, 6.0]) == pytest.approx((20.0, 20.0, 20.0))
    assert math.isnan(change_of([0.0], [1.0]).percent) and math.isnan(change_of([], [1.0]).percent)


def test_another_load_other_seeds_and_runs_not_to_be_believed_are_told():
    sides = {"a": [run()], "b": [run(request_rate=8.0, seed=1, void=["late"], unstable=True)]}
    said = remarks(sides)
    assert "NOT THE SAME LOAD: request_rate is 4.0 in a, 8.0 in b" in said
    assert "other arrivals: seeds 0 in a, 1 in b" in said
    assert {"VOID: 1 of 1 runs of b", "UNSTABLE: 1 of 1 runs of b"} <= set(said)
    assert remarks({"a": [run()], "b": [run()]}) == []


def test_servers_are_told_apart_by_their_settings_not_by_their_counters_and_start():
    left = {"server_info": {"scheduler": "fcfs", "created": 1}, "counters": {"x": 1.0}}
    right = {"server_info": {"scheduler": "vtc", "created": 2, "seed": 3}, "counters": {"x": 2.0}}
    assert server_differences(left, right) == [
        ("server_info.scheduler", "fcfs", "vtc"), ("server_info.seed", None, 3),
    ]  # fmt: skip


def test_a_file_of_several_runs_is_read_line_by_line(file):
    from pathlib import Path

    assert len(read_results(Path(file("a.json", run(), run())))) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"saturation": {}, "runs": []}'])
def test_what_is_no_result_is_refused_by_name(text, file, tmp_path, capsys):
    (tmp_path / "b.json").write_text(text)
    assert main(["bench", "compare", file("a.json", run()), str(tmp_path / "b.json")]) == 2
    assert "b.json" in capsys.readouterr().err


def test_one_file_is_too_few_and_a_missing_one_is_named(file, capsys):
    assert main(["bench", "compare", file("a.json", run())]) == 2
    assert main(["bench", "compare", *[file("a.json", run())] * 2]) == 2
    assert "given twice" in capsys.readouterr().err
    assert main(["bench", "compare", file("a.json", run()), "nowhere.json"]) == 2
    assert "nowhere.json: No such file" in capsys.readouterr().err
