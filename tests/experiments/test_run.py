"""Whole experiments: complete directories, resuming, interruption, bad input, and a real model of random weights."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
import yaml
from rich.console import Console

from experiments import storage
from experiments.analysis.report import write_report
from experiments.config import ConfigError, load_experiment
from experiments.launcher import Events, InTurn
from experiments.plan import Trial
from experiments.run import main
from experiments.runner import RunReport, run_experiment
from research_engine.other_load import CoreWatch
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_config import EXPERIMENT

FILES = {
    "config.yaml",
    "environment.json",
    "trials.json",
    "table.md",
    "table.csv",
    "table.tex",
    "effects.md",
    "effects.tex",
    "results.parquet",
    "report.html",
    "latency.png",
    "latency.pdf",
    "trials",
}
TRIAL_FILES = {"summary.json", "requests.parquet", "steps.parquet", "trace.json", "timing.json", "environment.json"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT)
    return path


def run(file: Path, out: Path, backend: StubBackend, *words: str) -> RunReport:
    report = run_experiment(*load_experiment(str(file), words), out, console=Console(quiet=True), backend=backend)
    write_report(out)
    return report


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a run but those with dates and durations, and plots."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
        and path.name not in ("environment.json", "timing.json")
        and path.suffix not in (".png", ".pdf", ".html")
    }


def test_a_run_directory_is_complete(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    report = run(file, out, StubBackend(), "outputs.plots=[latency_cdf]")
    assert (report.planned, report.finished, report.failed) == (4, 4, {})
    assert {path.name for path in out.iterdir()} == FILES
    trials = list((out / "trials").iterdir())
    assert len(trials) == 4
    for trial in trials:
        assert {path.name for path in trial.iterdir()} == TRIAL_FILES
        assert len(pd.read_parquet(trial / "requests.parquet")) == 4
        assert json.loads((trial / "trace.json").read_text())["traceEvents"]
    assert json.loads((out / "environment.json").read_text())["packages"]["numpy"]


@pytest.mark.parametrize(("kind", "clocks"), [("simulated", 3), ("real", 0)])
def test_progress_names_the_clock_of_each_number(
    kind: str, clocks: int, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoreWatch, "others", lambda watch: 0.0)
    backend, screen = StubBackend(), io.StringIO()
    backend.kind = kind
    experiment, cells = load_experiment(str(file), ["seeds=[3]", "order=as_written"])
    run_experiment(experiment, cells, tmp_path / "run", console=Console(file=screen, width=200), backend=backend)
    first, last = (line for line in screen.getvalue().splitlines() if " requests in " in line)
    virtual = r"4 of 4 requests in [\d.]+ s of virtual time, \d+ output tokens/virtual second"
    told = (
        (virtual, " of real time") if kind == "simulated" else (r"4 of 4 requests in [\d.]+ s, \d+ output tokens/s", "")
    )
    assert re.fullmatch(rf"fcfs, seed 3: {told[0]}; 1 of 2 trials, about \d+ s{told[1]} left", first)
    assert re.fullmatch(rf"priority, seed 3: {told[0]}", last)
    assert sum(first.count(word) for word in ("virtual", "real time")) == clocks


def test_every_policy_serves_the_same_arrivals_and_lengths(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend(), "workload.lengths={source: lognormal, max_total: 200}")
    plan = json.loads((tmp_path / "run" / "trials.json").read_text())
    served = {}
    for trial in plan:
        frame = pd.read_parquet(tmp_path / "run" / "trials" / trial["directory"] / "requests.parquet").sort_values(
            "request_id"
        )
        work = frame[["request_id", "arrival_time", "prompt_tokens", "output_tokens", "priority"]].to_numpy().tolist()
        served.setdefault(trial["seed"], []).append(work)
    assert all(works[0] == works[1] for works in served.values())
    assert served[3] != served[5]


def test_the_resolved_configuration_runs_the_same_trials_again(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "one", StubBackend(), "num_blocks=33")
    run(tmp_path / "one" / "config.yaml", tmp_path / "two", StubBackend())
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("interrupt_at", [1, 3])
def test_an_interrupted_and_resumed_run_equals_an_undisturbed_one(
    file: Path, tmp_path: Path, interrupt_at: int
) -> None:
    run(file, tmp_path / "whole", StubBackend())
    report = run(file, tmp_path / "torn", StubBackend(interrupt_at))
    finished = interrupt_at - 1
    assert report.interrupted is not None
    assert report.finished == finished
    assert len(list((tmp_path / "torn" / "trials").glob("*"))) == finished if finished else True
    again = StubBackend()
    report = run(file, tmp_path / "torn", again)
    assert report.reused == finished
    assert again.engines == 4 - finished
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_finished_trials_are_not_run_again_but_new_ones_are(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend())
    again = StubBackend()
    assert run(file, tmp_path / "run", again).finished == 0
    assert again.engines == 0
    assert run(file, tmp_path / "run", again, "seeds=[3, 5, 7]").finished == 2


def test_trials_keep_under_what_they_ran_and_tables_say_where_that_differs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, backend = tmp_path / "run", StubBackend()
    backend.kind = "real"  # the threads of a simulation do not matter
    monkeypatch.setattr(CoreWatch, "others", lambda watch: 0.0)  # whatever else runs on this machine
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run(file, out, backend)
    assert "different environments" not in (out / "table.md").read_text()
    again, *kept = sorted((out / "trials").iterdir())
    shutil.rmtree(again)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run(file, out, backend)
    assert json.loads((again / "environment.json").read_text())["threads"] == "1"
    assert {json.loads((trial / "environment.json").read_text())["threads"] for trial in kept} == {"2"}
    for name in ("table.md", "effects.md", "table.tex", "report.html"):
        text = (out / name).read_text()
        assert re.search(r"Trials ran in different environments: threads (1 \(1 trial\) / )?2 \(3 trials\)", text), name
    assert "1 (1 trial)" in (out / "table.md").read_text()
    (again / "environment.json").unlink()
    write_report(out)
    for name in ("table.md", "effects.md", "table.tex", "report.html"):
        text = " ".join((out / name).read_text().split())
        assert re.search(r"Nothing is recorded of what 1 trial \((fcfs|priority), seed \d\) ran under\.", text), name


def test_half_a_trial_counts_as_none(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend())
    trial = next((tmp_path / "run" / "trials").iterdir())
    (trial / "summary.json").write_text("{")
    assert run(file, tmp_path / "run", StubBackend()).finished == 1


def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    storage.write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write_with(path, fail)
    with contextlib.suppress(KeyboardInterrupt), storage.new_directory(tmp_path / "trial") as fresh:
        (fresh / "summary.json").write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]
    assert path.read_text() == "old"


def test_a_policy_that_fails_leaves_a_hole_and_the_others_run(file: Path, tmp_path: Path) -> None:
    policy = tmp_path / "bad.py"
    policy.write_text("class Bad:\n    def schedule(self, view):\n        return 1\n"
                      "    def on_arrival(self, request): pass\n    def on_step(self, record): pass\n"
                      "    def on_finish(self, request): pass\n")  # fmt: skip
    report = run(file, tmp_path / "run", StubBackend(), f"scheduler=[fcfs, {policy}:Bad]")
    assert report.finished == 2
    assert len(report.failed) == 2
    assert "must return a SchedulePlan" in next(iter(report.failed.values()))
    assert "2 of 2 missing" in (tmp_path / "run" / "table.md").read_text()


def test_a_policy_that_raises_is_told_with_its_own_line_and_where_the_traceback_is(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, out = tmp_path / "bad.py", tmp_path / "run"
    policy.write_text(
        "from schedulers.fcfs import FCFS\n\nclass Bad(FCFS):\n    def order(self, view):\n"
        "        return self.helper({})\n\n    def helper(self, ranks):\n        return ranks['a']\n"
    )
    words = [f"scheduler=[fcfs, {policy}:Bad]", "seeds=[3]", "executor=simulated", "gpu=h200"]
    assert main([str(file), *words, "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert f"Bad.schedule raised KeyError: 'a' (in {policy}:8, helper)" in told
    assert f"tracebacks are in {out / 'failures.json'}" in told
    assert "ranks['a']" in (out / "failures.json").read_text()


def test_a_request_that_cannot_fit_is_told_before_anything_runs(file: Path, tmp_path: Path) -> None:
    backend = StubBackend()
    with pytest.raises(ConfigError, match=r"the longest request has 12 tokens, num_blocks x block_size is 8; raise it"):
        run(file, tmp_path / "run", backend, "num_blocks=1", "block_size=8")
    assert backend.engines == 0


def test_list_names_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "quickstart" in capsys.readouterr().out


def test_a_mistyped_name_is_answered_with_all_that_list_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert main(["papers/nothing_like_it"]) == 2
    told = capsys.readouterr().err.partition("nearest first: ")[2].partition("; or give")[0]
    assert set(told.split(", ")) == listed


def test_options_may_stand_between_the_settings(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--out", str(tmp_path / "run"), "seeds=[7]", "--dry-run", "scheduler=fcfs"]) == 0
    assert "seed 7" in capsys.readouterr().out


def test_dry_run_prints_the_trials_and_makes_nothing(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file), "--dry-run", "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("to run  ") for line in lines) == 4
    assert lines[-1] == "4 of 4 trials to run, 3 s or more"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("seeds=6", ["note: seeds=6 is one seed, 6; several are a list, such as seeds=[0,1,2,3,4,5]", "1 seed (6)"]),
        ("seeds=[6]", ["2 cells x 1 seed (6)"]),
        ("seeds=0", ["2 cells x 1 seed (0)"]),
        ("num_blocks=65", ["2 cells x 2 seeds (3, 5)"]),
    ],
)
def test_the_plan_names_its_seeds(file: Path, word: str, told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--dry-run", word]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in told)
    assert ("note:" in out) == (len(told) == 2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["quikstart"], "no experiment 'quikstart'; valid ones, nearest first: quickstart"),
        (["papers/pagedattention_fig_51"], "valid ones, nearest first: papers/pagedattention_fig_1"),
        (["vtc_tabel_2"], "valid ones, nearest first: papers/vtc_table_2"),
        (["sim_vs_rael"], "valid ones, nearest first: sim_vs_real"),
        (["model=dummy:tinny"], "unknown model 'dummy:tinny'; known: dummy:tiny"),
        (["scheduler=fcsf"], "no scheduler 'fcsf'; valid ones, nearest first: fcfs"),
        (["modle=dummy:tiny"], "unknown key 'modle'; valid ones, nearest first: model"),
    ],
)
def test_a_users_mistake_ends_with_code_2_and_the_nearest_valid_ones(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_reservations_clients_and_predictions_reach_table_and_decision_log(file: Path, tmp_path: Path) -> None:
    """One experiment over all four reservations: its table has the KV split and the difference between clients."""
    from research_engine.engine.decision_log import DecisionLog

    out, names = tmp_path / "run", ["kv_reserved", "kv_internal", "kv_external", "service_difference_max",
                                    "predictor_kendall_tau"]  # fmt: skip
    workload = ("workload={num_requests: 40, arrivals: {process: poisson, rate: 1}, clients: {heavy: 0.8, light: 0.2}, "
                "lengths: {source: uniform, prompt: [4, 60], output: [4, 60]}, "
                "predictor: {kind: noisy, kendall_tau: 0.5}}")  # fmt: skip
    words = ["factors.reservation=[paged,reserve_max,reserve_pow2,reserve_oracle]", "scheduler=[fcfs]", "seeds=[0]",
             workload, "explain=true", "max_model_len=512", "num_blocks=64",
             f"outputs.table=[{','.join(names)}]"]  # fmt: skip
    assert run(file, out, StubBackend(), *words).finished == 4
    summaries = {}
    for trial in (out / "trials").iterdir():
        assert {path.name for path in trial.iterdir()} == TRIAL_FILES | {"decisions.jsonl"}
        summary = json.loads((trial / "summary.json").read_text())
        summaries[summary["levels"]["reservation"]] = summary
        log = DecisionLog.read(trial / "decisions.jsonl")
        assert (log.policy, len(log.decisions)) == ("FCFS", summary["metrics"]["num_steps"])
        assert set(pd.read_parquet(trial / "requests.parquet")["client"]) == {"heavy", "light"}
    internal = {name: summary["metrics"]["kv_split"]["internal"] for name, summary in summaries.items()}
    assert internal["reserve_max"] > internal["reserve_pow2"] > internal["reserve_oracle"]
    assert summaries["paged"]["workload"]["predictor_kendall_tau"] == pytest.approx(0.5, abs=0.02)
    assert all(s["metrics"]["service_difference"]["max"] >= 0 for s in summaries.values())
    assert "KV external waste (%)" in (out / "table.md").read_text()


def test_three_schedulers_on_a_real_model_of_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=dummy:tiny", "seeds=[0]", "workload.num_requests=8", "workload.arrivals.rate=100", "num_blocks=24",
             "workload.lengths={source: lognormal, max_prompt: 100, max_output: 30}"]  # fmt: skip
    out = tmp_path / "run"
    assert main([*words, "--out", str(out)]) == 0
    assert "3 of 3 trials are in" in capsys.readouterr().out
    for line in ("| measured | real, CPU | real, CPU | real, CPU |", "|  | fcfs | chunked_prefill | priority |"):
        assert line in (out / "table.md").read_text()
    for trial in json.loads((out / "trials.json").read_text()):
        summary = json.loads((out / "trials" / trial["directory"] / "summary.json").read_text())
        assert summary["metrics"]["num_completed"] == 8
        assert summary["metrics"]["output_tokens"] == summary["workload"]["output_tokens"]
    assert yaml.safe_load((out / "config.yaml").read_text())["base"]["model"] == "dummy:tiny"


def test_ctrl_c_keeps_finished_trials_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = [
        "model=dummy:tiny",
        "seeds=[0]",
        "workload.num_requests=6",
        "workload.arrivals.rate=3",
        "outputs.plots=[]",
        "order=as_written",
    ]
    words += ["workload.lengths={source: lognormal, max_prompt: 100, max_output: 30}", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-u", str(Path(main.__code__.co_filename)), *words],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("fcfs, seed 0"):
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "stopped in chunked_prefill, seed 0; 1 of 3 trials are finished and kept" in rest
    assert "No result yet: chunked_prefill; priority." in " ".join(rest.split())
    assert f"--out {tmp_path / 'run'}" in rest
    assert [path.name.split("-")[0] for path in (tmp_path / "run" / "trials").iterdir()] == ["fcfs"]
    assert not list(tmp_path.rglob(".*"))


class _Interrupted(InTurn):
    """Ctrl-C comes while the first trial runs."""

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        events.progress(0, trials[0].name)
        raise KeyboardInterrupt


def test_ctrl_c_before_a_trial_has_finished_prints_no_table(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.run._launcher", lambda options: _Interrupted(StubBackend()))
    assert main([str(file), "order=as_written", "--out", str(tmp_path / "run")]) == 130
    out = capsys.readouterr().out
    assert "stopped in fcfs, seed 3; 0 of 4 trials are finished and kept. To go on:\n  python" in out
    assert "no trial" not in out and not (tmp_path / "run" / "table.md").exists()


def test_two_processes_do_not_run_into_one_directory(file: Path, tmp_path: Path) -> None:
    with storage.sole_writer(tmp_path / "run"), pytest.raises(ConfigError, match="another process runs there"):
        run(file, tmp_path / "run", StubBackend())
    run(file, tmp_path / "run", StubBackend())


def test_what_a_killed_run_left_unfinished_is_cleared(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend())
    whole = contents(tmp_path / "run")

    (tmp_path / "run" / ".unfinished-table-ab12cd34.md").write_text("half")
    (tmp_path / "run" / ".mine-settings.json").write_text("{}")
    run(file, tmp_path / "run", StubBackend())
    assert [path.name for path in (tmp_path / "run").glob(".*")] == [".mine-settings.json"]
    (tmp_path / "run" / ".mine-settings.json").unlink()
    assert contents(tmp_path / "run") == whole


def test_ctrl_c_before_anything_runs_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.run._answer", interrupt)
    assert main(["--list"]) == 130
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_directory_with_files_that_no_run_wrote_is_left_as_it_is(file: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / name).write_text("mine")
    with pytest.raises(ConfigError, match=f"own: holds a {name} that no run wrote; choose another directory"):
        run(file, tmp_path / "own", StubBackend())
    assert [path.name for path in (tmp_path / "own").iterdir()] == [name]
    assert (tmp_path / "own" / name).read_text() == "mine"


def test_a_run_that_was_killed_while_it_wrote_its_head_goes_on(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend())
    for name in ("config.yaml", "environment.json"):
        (tmp_path / "run" / name).unlink()
    assert run(file, tmp_path / "run", StubBackend()).reused > 0
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_folder_of_traces_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", str(tmp_path / "none")]) == 2
    assert f"error: --traces {tmp_path / 'none'}: no such directory" in capsys.readouterr().err


def test_what_a_killed_process_left_half_written_is_cleared(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "run", StubBackend())
    trials = tmp_path / "run" / "trials"
    finished = sorted(trials.iterdir())
    (trials / f".{finished[0].name}-abcd").mkdir()
    assert run(file, tmp_path / "run", StubBackend()).reused == len(finished)
    assert sorted(trials.iterdir()) == finished


def test_an_output_directory_that_cannot_be_made_ends_with_code_2(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    assert main([str(file), "--out", str(tmp_path / "taken")]) == 2
    assert "File exists" in capsys.readouterr().err
    assert (tmp_path / "taken").is_file()
