"""Two checks that hold for every policy: outputs do not depend on it, and time comes to it from the view alone."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from research_engine.engine.contract import Scheduler
from research_engine.engine.foreign import words_of
from research_engine.engine.reservation import Reservation

from .random_runs import RandomRun

CLOCKS = ("time", "datetime", "timeit")


def check_policy(make: Callable[[], Scheduler], *, seeds: Iterable[int] = range(100)) -> Counter[str]:
    """Random small workloads on random small engines: arrivals, aborts, chunks, shared prefixes, n > 1, reservations.

    Args:
        make: a new policy for each run.
        seeds: of the runs.

    Returns:
        How often the runs went through preemptions, swaps, hits and the like, summed.

    Raises:
        AssertionError: an output differs from that of the request running alone, a block leaks, the policy breaks a
            rule of the plan, or not everybody ends. Names the seed and the reservation, to run it again.
    """
    facts: Counter[str] = Counter()
    reservations = get_args(Reservation)
    for index, seed in enumerate(seeds):
        reservation: Reservation = reservations[index % len(reservations)]
        run = RandomRun(seed, lambda rng: make(), reservation=reservation)
        try:
            run.finish()
        except Exception as error:
            what = f"seed {seed}, reservation {reservation}"
            raise AssertionError(f"{what}: {words_of(error)}") from error
        facts.update(run.facts())
    return facts


def reads_a_clock(path: Path) -> list[str]:
    """Lines of a policy's file that import a clock; `view.now` is its time, or a run cannot be simulated."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            clocks = [module for module in modules if module.split(".")[0] in CLOCKS]
            found += [f"{path.name}, line {node.lineno}: imports {module}" for module in clocks]
    return found
