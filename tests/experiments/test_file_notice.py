"""What is said of a file is said once, whatever runs read it, and is kept with every trial."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from experiments.analysis.report import write_report
from experiments.config import load_experiment
from experiments.plan import trials_of
from experiments.runner import run_experiment
from experiments.trial_runner import TrialRunner
from experiments.workloads.file_notice import FileNotice
from tests.datasets.test_sharegpt import conversations
from tests.experiments.stub_backend import StubBackend
from tests.experiments.test_config import EXPERIMENT
from tests.experiments.test_workloads import Words


class Reader(StubBackend):
    def tokenizer(self) -> Words:
        return Words()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCH_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A file that ends in mid-record."""
    path = tmp_path / "cut.json"
    path.write_text(conversations(10)[:-30], encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path, cut: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(EXPERIMENT.replace("{source: fixed, prompt: 8, output: 4}", f"{{source: sharegpt, path: {cut}}}"))
    return path


def notes_of(file: Path) -> list[str]:
    """What a run's check says."""
    notes: list[str] = []
    TrialRunner(Reader(), on_note=notes.append).check(trials_of(*load_experiment(str(file))))
    return notes


def test_a_file_that_is_cut_off_is_told_once_until_it_changes(file: Path, cut: Path) -> None:
    (told,) = notes_of(file)
    assert told.startswith("cut.json is cut off or damaged in record 10; 9 records were read and are used (said once")
    assert notes_of(file) == []
    cut.write_text(conversations(12)[:-30], encoding="utf-8")
    assert [note.partition(" (")[0] for note in notes_of(file)] == [
        "cut.json is cut off or damaged in record 12; 11 records were read and are used"
    ]


def test_a_check_that_nobody_listens_to_tells_nothing(file: Path, cache: Path) -> None:
    TrialRunner(Reader()).check(trials_of(*load_experiment(str(file))))
    assert not cache.exists() and len(notes_of(file)) == 1


def test_every_trial_and_the_page_keep_what_was_told_before(file: Path, tmp_path: Path) -> None:
    notes_of(file)
    console = Console(quiet=True)
    run_experiment(*load_experiment(str(file)), tmp_path / "run", console=console, backend=Reader())
    write_report(tmp_path / "run")
    summaries = sorted((tmp_path / "run" / "trials").glob("*/summary.json"))
    assert len(summaries) == 4
    for path in summaries:
        (warning,) = json.loads(path.read_text())["workload"]["warnings"]
        assert warning == "cut.json is cut off or damaged in record 10; 9 records were read and are used"
    assert (tmp_path / "run" / "report.html").read_text().count(warning) == 1


def test_where_nothing_can_be_remembered_it_is_told_every_time(cut: Path, cache: Path) -> None:
    cache.write_text("no directory")
    notice = FileNotice("it is cut off", cut)
    assert notice.is_news() and notice.is_news()
    os.remove(cache)
    (cache / "told").parent.mkdir()
    (cache / "told").write_text("no directory either")
    assert notice.is_news() and notice.is_news()
    os.remove(cache / "told")
    assert notice.is_news() and not notice.is_news()
