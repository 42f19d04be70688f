"""Classes out of users' files, and hints that begin with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from research_engine.plugins import callable_from_file, file_and_attribute, nearest_first

OWN = """
from dataclasses import dataclass

@dataclass
class Mine:
    size: int = 3
    def schedule(self): ...

class Other: ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own_policy.py"
    path.write_text(OWN)
    return path


def test_a_dataclass_of_a_file_can_be_made(file: Path) -> None:
    made = callable_from_file(file, "Mine", kind="scheduler", method="schedule")(size=5)
    assert made.size == 5


def test_a_wrong_name_lists_the_classes_of_the_kind_alone(file: Path) -> None:
    with pytest.raises(ValueError, match=r"own_policy.py has no class 'Mime'; valid ones, nearest first: Mine$"):
        callable_from_file(file, "Mime", kind="scheduler", method="schedule")


def test_a_forgotten_class_is_answered_with_those_of_the_file_and_none_that_it_imports(file: Path) -> None:
    file.write_text("from schedulers.fcfs import FCFS\nclass A(FCFS): ...\nclass B(FCFS): ...\n")
    for name in (str(file), f"{file}:"):
        found = file_and_attribute(name)
        assert found == (file, "")
        with pytest.raises(ValueError, match=r"own_policy.py: name the scheduler in it: .*py:A, .*py:B$"):
            callable_from_file(*found, kind="scheduler", method="schedule")
    assert file_and_attribute(f"{file}:A") == (file, "A")
    assert file_and_attribute("fcfs") is None
    with pytest.raises(ValueError, match=r"own_policy.py has no class with a method route, so no router to name"):
        callable_from_file(file, "", kind="router", method="route")


def test_a_missing_file_and_one_that_raises_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*none.py' to take the router 'R' from"):
        callable_from_file(tmp_path / "none.py", "R", kind="router", method="route")
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ValueError, match="broken.py cannot be loaded: ZeroDivisionError"):
        callable_from_file(broken, "R", kind="router", method="route")


def test_the_nearest_name_comes_first_and_none_is_left_out() -> None:
    assert nearest_first("prioritty", ["fcfs", "priority", "sjf"]) == "valid ones, nearest first: priority, fcfs, sjf"
    assert nearest_first("any", []) == "it takes none"
