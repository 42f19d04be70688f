"""Classes out of users' files, and hints that begin with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from research_engine.plugins import callable_from_file, file_and_attribute, nearest_first, source_files
from schedulers import fcfs

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


def package(folder: Path, name: str) -> Path:
    """A package of two folders whose policies import from one another."""
    inner = folder / name / "inner"
    inner.mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (folder / name / "sizes.py").write_text("SIZE = 7\n")
    path = inner / "policy.py"
    path.write_text(OWN.replace("@dataclass\n", "from ..sizes import SIZE\n@dataclass\n").replace("= 3", "= SIZE"))
    return path


def test_a_file_that_imports_from_its_package_is_loaded_as_its_module(tmp_path: Path) -> None:
    path = package(tmp_path, "a_package_of_policies")
    made = callable_from_file(path, "Mine", kind="scheduler", method="schedule")
    assert (made().size, made.__module__) == (7, "a_package_of_policies.inner.policy")
    assert callable_from_file(path, "Mine", kind="scheduler", method="schedule") is made
    with pytest.raises(ValueError, match=r"policy.py: name the scheduler in it: .*policy.py:Mine$"):
        callable_from_file(path, "", kind="scheduler", method="schedule")
    assert [file.name for file in source_files(path)] == ["__init__.py", "__init__.py", "policy.py", "sizes.py"]


def test_a_policy_that_ships_can_be_named_by_its_file() -> None:
    file = Path(fcfs.__file__)
    assert callable_from_file(file, "FCFS", kind="scheduler", method="schedule") is fcfs.FCFS


def test_a_package_whose_name_is_taken_is_told(tmp_path: Path) -> None:
    path = package(tmp_path, "json")
    with pytest.raises(
        ValueError, match=r"it imports from its package 'json', and .*__init__.py has that name already"
    ):
        callable_from_file(path, "Mine", kind="scheduler", method="schedule")


def test_a_file_that_needs_a_package_and_has_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text("from .base import X\n")
    with pytest.raises(ValueError, match=r"alone.py cannot be loaded: ImportError: attempted relative import"):
        callable_from_file(path, "Mine", kind="scheduler", method="schedule")
    path.write_text(f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .base import X\n{OWN}")
    assert callable_from_file(path, "Mine", kind="scheduler", method="schedule")().size == 3
    assert source_files(path) == [path]


def test_the_nearest_name_comes_first_and_none_is_left_out() -> None:
    assert nearest_first("prioritty", ["fcfs", "priority", "sjf"]) == "valid ones, nearest first: priority, fcfs, sjf"
    assert nearest_first("any", []) == "it takes none"
