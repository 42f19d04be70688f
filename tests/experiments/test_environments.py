"""What tables say of the environments that their trials ran in, and of those that are not recorded."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.analysis.environments import RanUnder, differing_facts, notes_of

COMMIT = "a" * 40


def trials(*environments: dict[str, Any] | None, kind: str = "real") -> list[RanUnder]:
    return [RanUnder(f"fcfs, seed {seed}", kind, environment) for seed, environment in enumerate(environments)]


def test_nothing_is_said_where_all_is_recorded_and_alike() -> None:
    assert notes_of(trials({"python": "3.11", "git": None}, {"python": "3.11", "git": None, "date": "x"})) == []
    assert notes_of(trials({"threads": "1"}, {"threads": 1})) == []
    assert notes_of([]) == []


@pytest.mark.parametrize(
    ("environments", "note"),
    [
        (({"threads": "1"}, {"threads": "2"}, {"threads": "2"}),
         "Trials ran in different environments: threads 1 (1 trial) / 2 (2 trials)."),
        (({"threads": "1"}, {"threads": "2"}, {}),
         "Trials ran in different environments: threads 1 (1 trial) / 2 (1 trial) / not recorded (1 trial)."),
        (({"git": {"commit": COMMIT, "dirty": True}}, {"git": None}),
         ("Trials ran in different environments: git.commit aaaaaaaaaa (1 trial) / none (1 trial); "
         "git.dirty true (1 trial) / none (1 trial).")),
        (({"packages": {"torch": "2.13", "numpy": "2.1"}}, {"packages": {}}),
         "Not recorded of 1 trial (fcfs, seed 1): packages.torch, packages.numpy."),
        (({"python": "3.11"}, None, {"python": "3.11"}, None),
         "Nothing is recorded of what 2 trials (fcfs, seed 1; fcfs, seed 3) ran under."),
        ((None,) * 6,
         ("Nothing is recorded of what 6 trials (fcfs, seed 0; fcfs, seed 1; fcfs, seed 2; fcfs, seed 3; and 2 more) "
         "ran under.")),
    ],
)  # fmt: skip
def test_what_differs_or_is_not_recorded_is_told(environments: tuple[dict[str, Any] | None, ...], note: str) -> None:
    assert notes_of(trials(*environments)) == [note]


def test_a_simulation_lacks_no_fact_of_its_machine() -> None:
    simulated = trials({"python": "3.11", "threads": "4"}, {"python": "3.11"}, kind="simulated")
    assert notes_of(simulated) == []
    assert notes_of([*simulated, RanUnder("real", "real", {"python": "3.11", "threads": "1"})]) == []


def test_a_trial_without_a_record_is_none_of_those_that_differ() -> None:
    told = trials({"python": "3.10"}, None, {"python": "3.11"})
    assert differing_facts(told) == {"python": {"3.10": 1, "3.11": 1}}
    assert [note.split()[0] for note in notes_of(told)] == ["Trials", "Nothing"]
