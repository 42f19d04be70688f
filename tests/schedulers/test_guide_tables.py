"""docs/schedulers.md lists what there is: policies with their own parameters, victim rules, common parameters."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import schedulers
from schedulers.base import PolicyScheduler
from schedulers.registry import BUILT_IN, find
from schedulers.victims import VICTIM_RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "schedulers.md").read_text()
COMMON = {field.name for field in dataclasses.fields(PolicyScheduler) if field.init}


def table(first_column: str) -> dict[str, list[str]]:
    """Rows of the table whose head begins with that column: name -> the other cells."""
    head = re.search(rf"^\| {first_column} \|.*\n\|[-|]+\n", TEXT, re.MULTILINE)
    assert head is not None
    rows = {}
    for line in TEXT[head.end() :].partition("\n\n")[0].splitlines():
        name, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        rows[name.strip(" `")] = cells
    return rows


def test_the_policies_listed_are_those_available():
    assert list(table("name")) == sorted(BUILT_IN)
    assert set(BUILT_IN) <= set(schedulers.available())


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_policys_own_parameters_are_listed(name):
    own = [field.name for field in dataclasses.fields(find(name)) if field.init and field.name not in COMMON]
    assert re.findall(r"`(\w+)`", table("name")[name][2]) == own


def test_the_common_parameters_are_listed():
    assert {name for names in table("parameter") for name in re.findall(r"\w+", names)} == COMMON


def test_the_victim_rules_are_listed():
    assert list(table("`victim_rule`")) == list(VICTIM_RULES)


def test_a_policy_fits_into_120_lines():
    paths = [ROOT / "schedulers" / f"{name}.py" for name in BUILT_IN]
    assert {path.name: n for path in paths if (n := len(path.read_text().splitlines())) >= 120} == {}
