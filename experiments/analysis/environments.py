"""Under what the trials of a run ran: facts of their environments, and those that are not the same for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TOLD_ELSEWHERE = ("date", "command")  # they differ from start to start, and say nothing of a result
_OF_MACHINES = ("platform", "cpu", "cpu_cores", "memory_gib", "threads")  # a simulation computes the same on any
_DIGITS_OF_A_COMMIT = 10


def facts_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of all that can matter to a result."""
    return flat({key: value for key, value in environment.items() if key not in _TOLD_ELSEWHERE})


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested mappings."""
    if isinstance(value, dict):
        inner = [flat(child, f"{prefix}.{key}" if prefix else str(key)) for key, child in value.items()]
        return {key: leaf for part in inner for key, leaf in part.items()}
    return {prefix: value}


def differing_facts(environments: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, int]]:
    """Fact -> value in words -> how many trials ran under it, of the facts with more values than one.

    Args:
        environments: of each trial: `real` or `simulated`, and its environment. Facts of machines are compared among
            real trials alone.
    """
    counts: dict[str, dict[str, int]] = {}
    for kind, environment in environments:
        for key, value in facts_of(environment).items():
            if kind == "real" or key not in _OF_MACHINES:
                told = counts.setdefault(key, {})
                told[_word(key, value)] = told.get(_word(key, value), 0) + 1
    return {key: told for key, told in counts.items() if len(told) > 1}


def note_of(differing: Mapping[str, Mapping[str, int]]) -> str:
    """The footnote of a table with trials of different environments."""
    facts = "; ".join(f"{key} {values_of(told)}" for key, told in differing.items())
    return f"Trials ran in different environments: {facts}."


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
