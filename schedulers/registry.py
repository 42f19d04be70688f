"""Schedulers by name: built in, from an installed package's entry point, or from a file."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from research_engine.engine.contract import Scheduler
from research_engine.engine.foreign import has_words, shown, words_of
from research_engine.plugins import callable_from_file, file_and_attribute, nearest_first

ENTRY_POINT_GROUP = "research_engine.schedulers"
BUILT_IN = {
    "chunked_prefill": "schedulers.chunked_prefill:ChunkedPrefill",
    "deficit_round_robin": "schedulers.deficit_round_robin:DeficitRoundRobin",
    "edf": "schedulers.edf:EDF",
    "fcfs": "schedulers.fcfs:FCFS",
    "hybrid_lookahead": "schedulers.hybrid_lookahead:HybridLookahead",
    "mlfq": "schedulers.mlfq:MLFQ",
    "orca": "schedulers.orca:Orca",
    "prefix_aware": "schedulers.prefix_aware:PrefixAware",
    "priority": "schedulers.priority:Priority",
    "sjf": "schedulers.sjf:SJF",
    "slo_aware": "schedulers.slo_aware:SLOAware",
    "srpt": "schedulers.srpt:SRPT",
    "static_batch": "schedulers.static_batch:StaticBatch",
    "vllm_v0": "schedulers.vllm_v0:VLLMV0",
    "vtc": "schedulers.vtc:VTC",
}


def available() -> list[str]:
    """Names that `create` knows, sorted: built-in policies and those of installed packages."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def create(name: str, **parameters: Any) -> Scheduler:
    """Make a policy.

    Args:
        name: a name out of `available()`, or `path/to/file.py:ClassName`.
        parameters: fields of the policy's dataclass.

    Raises:
        ValueError: no such policy, file, class or parameter, or a parameter out of range; lists the valid ones.
    """
    policy = find(name)
    valid = _parameters(policy)
    for key in parameters:
        if key not in valid:
            raise ValueError(f"scheduler {name!r} has no parameter {key!r}; {nearest_first(key, valid)}")
    try:
        scheduler = policy(**parameters)
    except Exception as error:
        if isinstance(error, ValueError) and has_words(error):
            raise
        told = words_of(error)
        raise ValueError(f"scheduler {name!r} cannot be made with {parameters!r}: {told}") from error
    for method in ("schedule(view)", "on_arrival(request)", "on_step(record)", "on_finish(request)"):
        if not callable(getattr(scheduler, method.partition("(")[0], None)):
            hint = "a subclass of research_engine.engine.contract.Scheduler has the events"
            raise ValueError(f"scheduler {name!r} makes {shown(scheduler)}, which has no method {method}; {hint}")
    return scheduler


def find(name: str) -> Callable[..., Scheduler]:
    """The class behind a name. Raises ValueError as `create` does."""
    if (own := file_and_attribute(name)) is not None:
        return callable_from_file(*own, kind="scheduler", method="schedule")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            try:
                found: Callable[..., Scheduler] = point.load()
            except Exception as error:
                told = words_of(error)
                raise ValueError(f"scheduler {name!r} of an installed package cannot be loaded: {told}") from error
            return found
    hint = " A policy of your own is named path/to/file.py:ClassName."
    raise ValueError(f"no scheduler {name!r}; {nearest_first(name, available())}.{hint}")


def _parameters(policy: Callable[..., Scheduler]) -> list[str]:
    if dataclasses.is_dataclass(policy):
        return [entry.name for entry in dataclasses.fields(policy) if entry.init]
    code = getattr(getattr(policy, "__init__", None), "__code__", None)
    return list(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]) if code is not None else []
