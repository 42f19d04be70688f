"""Reproductions that are no grid of trials: their tables follow from published data, from lengths, or from a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.analysis.paper_table import Computed
from experiments.config import ConfigError
from experiments.papers import (
    pagedattention_fig_15,
    pagedattention_fig_18a,
    pagedattention_fig_19a,
    pagedattention_fig_19a_gpu,
    pagedattention_fig_19b_gpu,
    sarathi_capacity,
    vtc_table_2,
)

_CORE, _H200 = "one core of an AMD EPYC", "one H200"


def _nothing() -> None:
    """Needs neither a device nor a file."""


@dataclass(frozen=True)
class Reproduction:
    """A table and how it comes about.

    Attributes:
        description: in a line.
        plan: what making it does, in words.
        table: makes it.
        seconds: that it took, and on what; None where it was never timed.
        check: raises what `table` would, of a device or a file that is not there.
    """

    description: str
    plan: str
    table: Computed
    seconds: tuple[float, str] | None
    check: Callable[[], object] = _nothing

    @property
    def cost(self) -> str:
        """In words."""
        return "of unknown length" if self.seconds is None else f"about {self.seconds[0]:g} s ({self.seconds[1]})"


COMPUTED = {
    "papers/pagedattention_fig_15": Reproduction(
        pagedattention_fig_15.DESCRIPTION, pagedattention_fig_15.PLAN, pagedattention_fig_15.table, (3, _CORE)
    ),
    "papers/pagedattention_fig_18a": Reproduction(
        pagedattention_fig_18a.DESCRIPTION, pagedattention_fig_18a.PLAN, pagedattention_fig_18a.table,
        (16, f"{_H200}, its kernels compiled before"), pagedattention_fig_18a.device,
    ),
    "papers/pagedattention_fig_19a": Reproduction(
        pagedattention_fig_19a.DESCRIPTION, pagedattention_fig_19a.PLAN, pagedattention_fig_19a.table, (1, _CORE)
    ),
    "papers/pagedattention_fig_19a_gpu": Reproduction(
        pagedattention_fig_19a_gpu.DESCRIPTION, pagedattention_fig_19a_gpu.PLAN, pagedattention_fig_19a_gpu.table,
        (12, _H200), pagedattention_fig_19a_gpu.check,
    ),
    "papers/pagedattention_fig_19b_gpu": Reproduction(
        pagedattention_fig_19b_gpu.DESCRIPTION, pagedattention_fig_19b_gpu.PLAN, pagedattention_fig_19b_gpu.table,
        None, pagedattention_fig_19b_gpu.check,
    ),
    "papers/sarathi_capacity": Reproduction(
        sarathi_capacity.DESCRIPTION, sarathi_capacity.PLAN, sarathi_capacity.table, (300, _CORE)
    ),
    "papers/vtc_table_2": Reproduction(
        vtc_table_2.DESCRIPTION, vtc_table_2.PLAN, vtc_table_2.table, (1, _CORE), vtc_table_2.files
    ),
}  # fmt: skip
"""Name -> what makes the table."""


def run_computed(name: str, words: Sequence[str], out: Path) -> int:
    """Make a table, print it, and write it to `out`.

    Args:
        name: out of COMPUTED.
        words: key=value words; there is nothing to set.
        out: a directory.

    Raises:
        ConfigError: a word was given, or data that the table is made of is not there.
    """
    table = _without_settings(name, words).table()
    table.write(out)
    print(table.markdown())
    return 0


def plan_computed(name: str, words: Sequence[str]) -> int:
    """Print what `run_computed` would do and what it costs; computes and writes nothing.

    Raises:
        ConfigError, WorkloadError: a word was given, or a device or a file that the table needs is not there.
    """
    found = _without_settings(name, words)
    found.check()
    print(f"to make   {name}: {found.plan}")
    print(f"1 table to make, {found.cost}")
    return 0


def _without_settings(name: str, words: Sequence[str]) -> Reproduction:
    if words:
        raise ConfigError(f"{name}: {words[0]!r}: it is made in one way alone and has no settings")
    return COMPUTED[name]
