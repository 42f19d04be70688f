"""The measurement of decisions runs for every policy, serves what it says, and refuses what cannot be measured."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import pytest

import schedulers
from research_engine.bench import scheduler as bench
from research_engine.cli import main

SMALL = {"running": 8, "waiting": 30, "steps": 4, "prompt_tokens": 5}


@pytest.mark.parametrize("name", schedulers.available())
def test_every_policy_is_measured_with_all_seats_taken_and_a_full_queue(name: str) -> None:
    options = bench.SchedulerBenchOptions(**SMALL)
    cost = bench.measure(options, name)
    assert min(cost.full, cost.turnover) > 0 and cost.events >= 0
    crowd = bench._Crowd(options, name, turnover=False)
    crowd.step()
    view = crowd.engine.view()
    assert (view.num_running, view.num_waiting) == (8, 30)


def test_in_turnover_one_ends_and_one_is_admitted_in_every_step() -> None:
    crowd = bench._Crowd(bench.SchedulerBenchOptions(**SMALL), "fcfs", turnover=True)
    seen: list[set[str]] = []
    for _ in range(12):
        crowd.step()
        seen.append({request.id for request in crowd.engine.view().running})
    assert all(len(new - old) <= 1 for old, new in itertools.pairwise(seen))
    assert len(set().union(*seen)) >= 14


def test_the_table_names_the_policies(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vtc", "--running", "4", "--waiting", "5", "--steps", "2", "--prompt-tokens", "3"]
    assert main(["bench", "scheduler", *words]) == 0
    assert "vtc" in capsys.readouterr().out


def test_vllms_side_is_run_by_its_own_python_and_its_figures_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver in vLLM's place: started alone in a directory, with the same sizes on both sides."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import json, os, sys\n"
        "assert os.listdir('.') == ['stand_in.py'] and 'PYTHONPATH' not in os.environ\n"
        "assert sys.argv[1:] == ['--running', '4', '--prompt-tokens', '3', '--steps', '2'], sys.argv\n"
        "print('noise'); print(json.dumps({'version': '1.2', 'total': 1e6, 'fastest_tenth': 1e6}))\n"
    )
    monkeypatch.setattr(bench, "DRIVER", stand_in)
    words = ["fcfs", "--running", "4", "--waiting", "5", "--steps", "2", "--prompt-tokens", "3", "--rounds", "1"]
    assert main(["bench", "scheduler", *words, "--vllm-python", sys.executable]) == 0
    assert "vLLM 1.2" in capsys.readouterr().out
    stand_in.write_text("raise SystemExit('no vllm here')")
    assert main(["bench", "scheduler", *words, "--vllm-python", sys.executable]) == 2
    assert "no vllm here" in capsys.readouterr().err


def test_the_driver_imports_nothing_of_this_project() -> None:
    tree = ast.parse(bench.DRIVER.read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [
        module for module in modules if module.split(".")[0] in ("research_engine", "schedulers", "experiments")
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--running", "0"], "running = 0: must be >= 1"),
        (["--waiting", "-1"], "waiting = -1: must be >= 0"),
        (["fcsf"], "no scheduler 'fcsf'; valid ones, nearest first: fcfs"),
        (["--vllm-python", "/no/such/python"], "vllm_python = '/no/such/python': no such file"),
    ],
)
def test_a_mistake_is_told(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "scheduler", *words])
    assert code == 2 and told in capsys.readouterr().err
