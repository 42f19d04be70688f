"""docs/writing_a_scheduler.md does what it says: its files are written, its programs and commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "writing_a_scheduler.md").read_text(), re.DOTALL)
FILES = {m[1]: text for kind, text in BLOCKS if kind == "python" and (m := re.match(r"# (\w+\.py)\n", text))}
PROGRAMS = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# ")]
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


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
    assert len(FILES) == 3 and len(PROGRAMS) == 2 and len(COMMANDS) == 1
    assert max(len([line for line in text.splitlines() if line.strip()]) for text in FILES.values()) <= 31


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_the_guides_programs_run(folder, index):
    run_in(folder, [sys.executable, "-c", PROGRAMS[index]])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_guides_commands_are_accepted(folder, command):
    """--dry-run checks the experiment, the policies and their parameters."""
    words = shlex.split(command)
    assert words[:2] == ["python", "experiments/run.py"]
    out = run_in(folder, [sys.executable, str(ROOT / "experiments" / "run.py"), *words[2:], "--dry-run"])
    assert "ShortestFirst" in out and "fcfs" in out
