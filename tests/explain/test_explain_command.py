"""`run.py --explain` writes decisions into the run directory, and `research-engine explain` tells a life from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.run import main as run_experiment
from research_engine.cli import main

SMALL = ["scheduler_comparison", "scheduler=[vtc,priority]", "seeds=[0]", "workload.num_requests=40", "num_blocks=200",
         "outputs.plots=[]"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "explained"
    assert run_experiment([*SMALL, "--explain", "--out", str(out)]) == 0
    return out


def test_a_life_is_told_and_drawn(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "life.png"
    assert main(["explain", str(run), "request-0030", "--trial", "vtc", "--out", str(picture)]) == 0
    told = capsys.readouterr().out
    for words in (", policy VTC", "Request request-0030 of client", "admitted after", "ended (length)", "· waiting"):
        assert words in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_goes_beside_the_trial_unless_told_otherwise(run: Path) -> None:
    (trial,) = run.glob("trials/priority*")
    assert main(["explain", str(trial), "request-0001"]) == 0
    assert (trial / "explain-request-0001.png").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{run}", "request-0001"], "2 trials are meant; name one by --trial: priority-seed0"),
        (["{run}", "request-0001", "--trial", "vtcc"], "no trial 'vtcc' in"),
        (
            ["{run}", "request-9", "--trial", "vtc"],
            "no request 'request-9' in this run; there are 40, the nearest: request-",
        ),
        (["{run}/nowhere", "request-0001"], "no directory"),
        (["{run}/..", "request-0001"], "is no run directory"),
        (["{run}", "request-0001", "--trial", "vtc", "--out", "x.gif"], "must end with .png, .pdf or .svg"),
        (["{run}", "request-0001", "--trial", "vtc", "--others", "-1"], "others = -1: must be >= 0"),
    ],
)
def test_a_mistake_is_told_with_what_there_is(
    run: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(word.format(run=run) for word in words)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_without_decisions_is_told_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plain"
    assert run_experiment([*SMALL[:1], "scheduler=[fcfs]", *SMALL[2:], "--out", str(out)]) == 0
    assert not list(out.glob("trials/*/decisions.jsonl"))
    assert main(["explain", str(out), "request-0001"]) == 2
    assert "run the experiment again with --explain" in capsys.readouterr().err
