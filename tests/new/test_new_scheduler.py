"""The skeleton of a policy works, its test passes, it takes parameters everywhere, and nothing is overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import schedulers
from experiments.config import ConfigError, load_experiment
from experiments.run import main as run_experiment
from research_engine.cli import main
from research_engine.new.scheduler import class_name

ROOT = Path(__file__).parents[2]


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    assert main(["new", "scheduler", "my_policy", "--out", str(tmp_path)]) == 0
    return tmp_path / "my_policy.py"


def test_its_test_passes_where_nothing_but_the_package_is(skeleton: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_policy.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=skeleton.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


def test_it_is_commented_and_lint_free(skeleton: Path) -> None:
    text = skeleton.read_text()
    assert 40 < len(text.splitlines()) < 120 and text.count("#") > 15
    assert class_name("a_b2_c") == "AB2C" and "class MyPolicy(PolicyScheduler):" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_next_steps_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "scheduler", "other", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for words in (
        f"python -m pytest {tmp_path}/test_other.py",
        f"scheduler=[fcfs,{tmp_path}/other.py:Other]",
        '[project.entry-points."research_engine.schedulers"]',
        'other = "YOUR_PACKAGE.other:Other"',
    ):
        assert words in told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ShortFirst", "must be small letters, digits and _, as a module's, such as 'short_first'"),
        ("short-first", "such as 'short_first'"),
        ("../evil", "such as 'evil'"),
        ("class", "such as 'my_policy'"),
        ("9lives", "such as 'my_policy'"),
        ("fcfs", "choose another, taken are chunked_prefill, "),
        ("random", "it is that of a module of Python's"),
    ],
)
def test_a_bad_name_is_refused_and_nothing_written(
    tmp_path: Path, name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "scheduler", name, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("existing", ["mine.py", "test_mine.py"])
def test_a_file_that_is_there_is_left_alone(tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / existing).write_text("precious")
    assert main(["new", "scheduler", "mine", "--out", str(tmp_path)]) == 2
    assert "is there already; it is left as it is" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(existing, "precious")]


def test_a_directory_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "scheduler", "mine", "--out", str(tmp_path / "no")]) == 2
    assert "no such directory" in capsys.readouterr().err


# A user's policy with its own parameters: from a file and from an installed package, in YAML and on the command line.


@pytest.fixture
def installed(skeleton: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The skeleton as a package would install it: found by an entry point, under the name `patient`."""
    package = skeleton.parent / "site"
    metadata = package / "someones_policies-1.0.dist-info"
    metadata.mkdir(parents=True)
    (package / "someones_policies.py").write_text(skeleton.read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-policies\nVersion: 1.0\n")
    point = "[research_engine.schedulers]\npatient = someones_policies:MyPolicy\n"
    (metadata / "entry_points.txt").write_text(point)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "someones_policies", raising=False)
    return "patient"


@pytest.mark.parametrize("source", ["file", "entry point"])
def test_its_parameters_are_set_on_the_command_line_and_in_yaml(
    source: str, skeleton: Path, installed: str, tmp_path: Path
) -> None:
    name = f"{skeleton}:MyPolicy" if source == "file" else installed
    policy = schedulers.create(name, patience=3.0, victim_rule="fewest_tokens_lost")
    assert (type(policy).__name__, policy.patience) == ("MyPolicy", 3.0)

    _, (cell,) = load_experiment("quickstart", [f"scheduler=[{name}]", "seeds=[0]", "scheduler_params.patience=2.5"])
    assert cell.settings.scheduler_params == {"patience": 2.5}

    yaml = tmp_path / "mine.yaml"
    yaml.write_text(f"base: {{model: 'dummy:tiny', scheduler: '{name}', scheduler_params: {{patience: -1}}}}\n")
    with pytest.raises(ConfigError, match="mine.yaml, line 1: patience = -1: must be seconds >= 0"):
        load_experiment(str(yaml))
    yaml.write_text(f"base: {{model: 'dummy:tiny', scheduler: '{name}', scheduler_params: {{patince: 1}}}}\n")
    with pytest.raises(ConfigError, match="has no parameter 'patince'; valid ones, nearest first: patience"):
        load_experiment(str(yaml))


def test_an_installed_policy_is_listed_and_runs_in_an_experiment(installed: str, tmp_path: Path) -> None:
    assert installed in schedulers.available()
    with pytest.raises(ValueError, match="no scheduler 'patent'; valid ones, nearest first: patient, "):
        schedulers.create("patent")
    out = tmp_path / "run"
    words = [
        "scheduler_comparison",
        f"scheduler=[{installed}]",
        "seeds=[0]",
        "workload.num_requests=5",
        "outputs.plots=[]",
    ]
    assert run_experiment([*words, "--out", str(out)]) == 0
    assert "patient" in (out / "table.md").read_text()


def test_an_entry_point_that_cannot_be_loaded_is_named(installed: str, tmp_path: Path) -> None:
    (tmp_path / "site" / "someones_policies.py").write_text("import no_such_module\n")
    with pytest.raises(
        ValueError, match="scheduler 'patient' of an installed package cannot be loaded: ModuleNotFound"
    ):
        schedulers.create(installed)
