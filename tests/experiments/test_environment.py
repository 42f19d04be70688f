"""What a run says of the repository it ran from, which it only looks at."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import environment


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_and_changes_are_told_and_the_repository_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    file = tmp_path / "file"
    file.write_text("as committed")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    os.utime(file, (1, 1))  # what git would note in its index
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert environment._git() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    assert (tmp_path / ".git" / "index").read_bytes() == index
    file.write_text("changed")
    assert environment._git()["dirty"] is True
