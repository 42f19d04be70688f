"""docs/write_a_scheduler.md does what it says: its files are written, its programs and commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "write_a_scheduler.md").read_text(), re.DOTALL)
FILES = {m[1]: text for kind, text in BLOCKS if kind == "python" and (m := re.match(r"# (\w+\.py)\n", text))}
PROGRAMS = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# ")]
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
EXPERIMENTS = [line for line in COMMANDS if line.startswith("python experiments/run.py ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder, with the guide's files in it."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_in(folder: Path, command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_guide_has_what_this_test_looks_for():
    assert len(FILES) == 3 and len(PROGRAMS) == 2 and len(COMMANDS) == 6
    assert max(len([line for line in text.splitlines() if line.strip()]) for text in FILES.values()) <= 31


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_the_guides_programs_run(folder, index):
    run_in(folder, [sys.executable, "-c", PROGRAMS[index]])


@pytest.fixture
def with_skeleton(folder: Path) -> Path:
    assert COMMANDS[0] == "research-engine new scheduler my_policy"
    run_in(folder, [sys.executable, "-m", "research_engine.cli", *COMMANDS[0].split()[1:]])
    return folder


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_the_guides_experiments_are_accepted(with_skeleton, command):
    """--dry-run checks the experiment, the policies and their parameters."""
    words = shlex.split(command)
    out = run_in(with_skeleton, [sys.executable, str(ROOT / "experiments" / "run.py"), *words[2:], "--dry-run"])
    (policies,) = [word.removeprefix("scheduler=") for word in words if word.startswith("scheduler=")]
    for policy in policies.strip("[]").split(","):
        assert policy.rpartition(":")[2] in out


def test_the_skeletons_test_passes_as_the_guide_says(with_skeleton):
    assert COMMANDS[1] == "python -m pytest test_my_policy.py"
    assert "5 passed" in run_in(with_skeleton, [sys.executable, *COMMANDS[1].split()[1:]])


def test_the_guides_explanation_is_there(folder):
    """The run that it makes is tested in tests/explain; here, that the command takes what the guide gives it."""
    words = shlex.split(COMMANDS[-1])
    assert words[:2] == ["research-engine", "explain"] and words[2] == shlex.split(COMMANDS[-2])[-1]
