"""Under what the trials of a run ran: facts of their environments, and those that are not the same for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_TOLD_ELSEWHERE = ("date", "command")  # they differ from start to start, and say nothing of a result
_OF_MACHINES = ("platform", "cpu", "cpu_cores", "memory_gib", "threads")  # a simulation computes the same on any
_DIGITS_OF_A_COMMIT = 10
_MOST_NAMES = 4  # of trials in a footnote
_NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class RanUnder:
    """Under what one trial ran.

    Attributes:
        name: of the trial.
        kind: `real` or `simulated`.
        environment: None where there is no record.
    """

    name: str
    kind: str
    environment: Mapping[str, Any] | None

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Dotted key -> value of what is recorded and matters to its result."""
        facts = facts_of(self.environment or {})
        return {key: value for key, value in facts.items() if self._depends_on(key)}

    def lacks(self, key: str) -> bool:
        """Whether its record should have this fact and has not."""
        return self.environment is not None and self._depends_on(key) and key not in self.facts

    def _depends_on(self, key: str) -> bool:
        return self.kind == "real" or key not in _OF_MACHINES


def facts_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of all that can matter to a result."""
    facts = flat({key: value for key, value in environment.items() if key not in _TOLD_ELSEWHERE})
    if facts.get("git", "") is None:  # no repository: none of the facts of one
        facts |= dict.fromkeys(("git.commit", "git.dirty"), facts.pop("git"))
    return facts


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested mappings."""
    if isinstance(value, dict):
        inner = [flat(child, f"{prefix}.{key}" if prefix else str(key)) for key, child in value.items()]
        return {key: leaf for part in inner for key, leaf in part.items()}
    return {prefix: value}


def differing_facts(trials: Sequence[RanUnder]) -> dict[str, dict[str, int]]:
    """Fact -> value in words -> how many trials ran under it, of the facts with more values than one.

    A trial whose record lacks a fact that others have counts as `not recorded`; one without any record counts nowhere.
    Facts of machines are compared among real trials alone.
    """
    out = {}
    for key in _all_facts(trials):
        values = [_word(key, one.facts[key]) for one in trials if key in one.facts]
        if len(set(values)) > 1:
            lacking = [_NOT_RECORDED for one in trials if one.lacks(key)]
            out[key] = dict(Counter([*values, *lacking]))
    return out


def notes_of(trials: Sequence[RanUnder]) -> list[str]:
    """Footnotes of a table: what is not the same for all trials of it, and of which nothing or not all is known."""
    notes, differing = [], differing_facts(trials)
    if differing:
        facts = "; ".join(f"{key} {values_of(told)}" for key, told in differing.items())
        notes.append(f"Trials ran in different environments: {facts}.")
    lacking: dict[tuple[str, ...], list[str]] = {}
    for key in _all_facts(trials):
        names = tuple(one.name for one in trials if one.lacks(key))
        if names and key not in differing:
            lacking.setdefault(names, []).append(key)
    notes += [f"Not recorded of {named(names)}: {', '.join(keys)}." for names, keys in lacking.items()]
    if without := without_record(trials):
        notes.append(f"Nothing is recorded of what {named(without)} ran under.")
    return notes


def without_record(trials: Sequence[RanUnder]) -> list[str]:
    """Names of the trials of whose environment there is no record at all."""
    return [one.name for one in trials if one.environment is None]


def named(names: Sequence[str]) -> str:
    """`2 trials (fcfs, seed 0; fcfs, seed 1)`: how many, and the first of them by name."""
    more = len(names) - _MOST_NAMES
    shown = "; ".join(names[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
    return f"{_trials(len(names))} ({shown})"


def _all_facts(trials: Sequence[RanUnder]) -> list[str]:
    return list(dict.fromkeys(key for one in trials for key in one.facts))


def values_of(told: Mapping[str, int]) -> str:
    """The values of one fact, each with its trials."""
    return " / ".join(f"{value} ({_trials(count)})" for value, count in told.items())


def _word(key: str, value: Any) -> str:
    if key == "threads":
        return "not set" if value is None else f"{value}"
    if key == "git.commit" and isinstance(value, str):
        return value[:_DIGITS_OF_A_COMMIT]
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"
