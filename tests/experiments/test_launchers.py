"""Where trials run changes nothing of what they give; what dies is tried once more and then is a hole."""

from __future__ import annotations

import errno
import importlib.util
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments.analysis.report import write_report
from experiments.config import ConfigError, load_experiment
from experiments.launcher import Launcher, failure_of
from experiments.processes import Processes
from experiments.run import main
from experiments.runner import RunReport, run_experiment
from research_engine.engine.contract import Batch, StepResult
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_run import contents

SIMULATED = """\
description: test
base:
  model: dummy:tiny
  executor: simulated
  gpu: h200
  num_blocks: 64
  workload:
    num_requests: 6
    arrivals: {process: poisson, rate: 500}
    lengths: {source: uniform, prompt: [4, 40], output: [2, 8]}
factors:
  scheduler: [fcfs, priority]
seeds: [3, 5]
baseline: {scheduler: fcfs}
outputs: {plots: []}
"""
KILLER = """\
import os, signal
from schedulers.fcfs import FCFS

class Killer(FCFS):
    def order(self, view):
        marker = {marker!r}
        if marker is None or not os.path.exists(marker):
            if marker is not None:
                open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().order(view)
"""
GRID = """\
base:
  model: dummy:tiny
  executor: simulated
  gpu: h200
  scheduler: "{policy}:KillsAll"
  workload:
    num_requests: 6
    arrivals: {{process: poisson, rate: 500}}
    lengths: {{source: uniform, prompt: [4, 40], output: [2, 8]}}
factors:
  num_blocks: [32, 64]
  max_num_seqs: [2, 8]
seeds: [3, 5]
baseline: {{num_blocks: 64}}
outputs: {{plots: []}}
"""
KILLS_ALL = """\
import os, signal
from pathlib import Path
from schedulers.fcfs import FCFS

class KillsAll(FCFS):
    def order(self, view):
        finished = [path for path in Path({trials!r}).glob("*") if path.name[0] != "."]
        if len(finished) >= 3 and not os.path.exists({marker!r}):
            open({marker!r}, "w").close()
            os.killpg(0, signal.SIGKILL)
        return super().order(view)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SIMULATED)
    return path


def run(file: Path, out: Path, *words: str, launcher: Launcher | None = None, backend: object = None) -> RunReport:
    experiment, cells = load_experiment(str(file), words)
    report = run_experiment(experiment, cells, out, console=Console(quiet=True), launcher=launcher, backend=backend)  # type: ignore[arg-type]
    write_report(out)
    return report


def in_this_process(file: Path, out: Path) -> dict[str, bytes]:
    from experiments.chosen_backend import ChosenBackend

    run(file, out, backend=ChosenBackend(progress=False))
    return contents(out)


def test_the_same_experiment_twice_gives_the_same_tables_to_the_last_digit(file: Path, tmp_path: Path) -> None:
    assert in_this_process(file, tmp_path / "one") == in_this_process(file, tmp_path / "two")


def test_two_processes_give_what_one_gives(file: Path, tmp_path: Path) -> None:
    report = run(file, tmp_path / "two", launcher=Processes(2))
    assert (report.finished, report.failed) == (4, {})
    assert contents(tmp_path / "two") == in_this_process(file, tmp_path / "one")


def test_a_grid_killed_in_the_middle_and_resumed_equals_an_undisturbed_one(tmp_path: Path) -> None:
    torn, marker, policy = tmp_path / "torn", tmp_path / "killed", tmp_path / "kills_all.py"
    policy.write_text(KILLS_ALL.format(trials=str(torn / "trials"), marker=str(marker)))
    file = tmp_path / "grid.yaml"
    file.write_text(GRID.format(policy=policy))
    command = [sys.executable, str(Path(main.__code__.co_filename)), str(file), "--jobs", "2", "--out"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    killed = subprocess.run([*command, str(torn)], start_new_session=True, check=False, **quiet)  # type: ignore[call-overload]
    assert killed.returncode == -signal.SIGKILL
    assert marker.exists()
    assert not (torn / "table.md").exists()
    finished = sum(not path.name.startswith(".") for path in (torn / "trials").iterdir())
    assert 3 <= finished < 8
    report = run(file, torn, launcher=Processes(2))
    assert (report.reused, report.finished, report.failed) == (finished, 8 - finished, {})
    assert contents(torn) == in_this_process(file, tmp_path / "whole")


def test_a_trial_that_kills_its_process_is_a_hole_and_the_others_run(file: Path, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER.format(marker=None))
    out = tmp_path / "run"
    report = run(file, out, f"scheduler=[fcfs, {tmp_path / 'killer.py'}:Killer]", "seeds=[3]")
    assert report.finished == 1
    assert report.failed == {"Killer, seed 3": "its process was killed by SIGKILL (memory may have run out)"}
    table = (out / "table.md").read_text()
    assert "1 of 1 missing" in table
    assert "Failed twice: Killer, seed 3: its process was killed by SIGKILL" in table
    assert "killed by SIGKILL" in (out / "report.html").read_text()


def test_a_trial_that_dies_once_is_run_again_and_is_no_hole(file: Path, tmp_path: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER.format(marker=str(tmp_path / "died")))
    report = run(file, tmp_path / "run", f"scheduler=[{tmp_path / 'killer.py'}:Killer]", "seeds=[3]")
    assert (report.finished, report.failed) == (1, {})
    assert not (tmp_path / "run" / "failures.json").exists()


class FailingBackend(StubBackend):
    """Raises an error in the first step of the engines of these numbers, from 1."""

    def __init__(self, error: Exception, at: set[int]) -> None:
        super().__init__()
        self.error, self.at = error, at

    def engine(self, settings: object, seed: int) -> object:  # type: ignore[override]
        engine = super().engine(settings, seed)  # type: ignore[arg-type]
        if self.engines in self.at:

            def fail(batch: Batch) -> StepResult:
                raise self.error

            engine.executor.execute = fail  # type: ignore[method-assign]
        return engine


def test_ctrl_c_is_the_parents_affair_from_a_process_first_moment_on() -> None:
    """The signal is blocked while a process is made, so that it inherits that, and is not blocked afterwards here."""
    seen, make = [], multiprocessing.get_context("spawn").Process.start

    def start(process: multiprocessing.process.BaseProcess) -> None:
        seen.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        make(process)

    processes = Processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.get_context("spawn").Process, "start", start)
        processes._worker(0)
    processes.close()
    assert seen == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_exception_is_told_and_kept_with_its_traceback(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    report = run(file, out, "seeds=[3]", backend=FailingBackend(RuntimeError("no luck"), {1, 3}))
    ((name, why),) = report.failed.items()
    assert why == "RuntimeError: no luck"
    (failure,) = json.loads((out / "failures.json").read_text()).values()
    assert "in fail" in failure["details"]
    assert run(file, out, "seeds=[3]", backend=StubBackend()).finished == 1  # the hole alone
    assert not (out / "failures.json").exists()
    assert f"Failed twice: {name}" not in (out / "table.md").read_text()


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no luck\nat all"), "RuntimeError: no luck"),
        (RuntimeError(), "RuntimeError: no message"),
        (MuteError(), "MuteError (its message could not be made: RuntimeError: no str)"),
    ],
)
def test_why_a_trial_failed_is_one_line_whatever_it_raised(error: Exception, reason: str) -> None:
    failure = failure_of(error)
    assert failure.reason == reason and type(error).__name__ in failure.details


def test_a_full_disk_ends_the_run_and_what_had_finished_is_kept(file: Path, tmp_path: Path) -> None:
    full = FailingBackend(OSError(errno.ENOSPC, "No space left on device"), {2})  # type: ignore[arg-type]
    with pytest.raises(OSError, match="No space left"):
        run(file, tmp_path / "torn", backend=full)
    assert len(list((tmp_path / "torn" / "trials").iterdir())) == 1
    again = StubBackend()
    assert run(file, tmp_path / "torn", backend=again).reused == 1
    assert again.engines == 3
    run(file, tmp_path / "whole", backend=StubBackend())
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_a_mistake_that_a_process_finds_is_told_as_one(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file), "num_blocks=2", "--out", str(tmp_path / "run")]) == 2
    assert "tokens, max_model_len is 32; raise it" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(900)
def test_a_local_ray_with_two_workers_gives_what_one_process_gives(file: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'research_engine[ray]'")
    from experiments.on_ray import RayCluster

    try:
        cluster = RayCluster("local", 2)
    except ConfigError as error:
        if "timed out during startup" not in str(error):
            raise
        pytest.skip(f"this machine is too busy for Ray, whose node has to start within fixed times: {error}")
    report = run(file, tmp_path / "ray", launcher=cluster)
    assert (report.finished, report.failed) == (4, {})
    assert contents(tmp_path / "ray") == in_this_process(file, tmp_path / "one")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", ["debug", "local"])
def test_a_slurm_array_gives_what_one_process_gives(cluster: str, file: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed: pip install 'research_engine[slurm]'")
    from experiments.on_slurm import SlurmArray

    text = file.read_text()
    file.write_text(text.replace("seeds: [3, 5]", "seeds: [3]"))
    report = run(file, tmp_path / "slurm", launcher=SlurmArray.of(f"cluster={cluster}"))
    assert (report.finished, report.failed) == (2, {})
    found = {name: data for name, data in contents(tmp_path / "slurm").items() if not name.startswith("slurm/")}
    assert found == in_this_process(file, tmp_path / "one")


def test_wrong_words_for_slurm_are_told() -> None:
    from experiments.on_slurm import SlurmArray

    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is not installed: pip install 'research_engine[slurm]'")
    with pytest.raises(ConfigError, match="'gpu': expected key=value"):
        SlurmArray.of("gpu")
