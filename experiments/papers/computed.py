"""Reproductions that are no grid of trials: their tables follow from published data, from lengths, or from a search."""

from __future__ import annotations

from collections.abc import Sequence
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

COMPUTED: dict[str, tuple[str, Computed]] = {
    "papers/pagedattention_fig_15": (pagedattention_fig_15.DESCRIPTION, pagedattention_fig_15.table),
    "papers/pagedattention_fig_18a": (pagedattention_fig_18a.DESCRIPTION, pagedattention_fig_18a.table),
    "papers/pagedattention_fig_19a": (pagedattention_fig_19a.DESCRIPTION, pagedattention_fig_19a.table),
    "papers/pagedattention_fig_19a_gpu": (pagedattention_fig_19a_gpu.DESCRIPTION, pagedattention_fig_19a_gpu.table),
    "papers/pagedattention_fig_19b_gpu": (pagedattention_fig_19b_gpu.DESCRIPTION, pagedattention_fig_19b_gpu.table),
    "papers/sarathi_capacity": (sarathi_capacity.DESCRIPTION, sarathi_capacity.table),
    "papers/vtc_table_2": (vtc_table_2.DESCRIPTION, vtc_table_2.table),
}
"""Name -> description, and what makes the table."""


def run_computed(name: str, words: Sequence[str], out: Path) -> int:
    """Make a table, print it, and write it to `out`.

    Args:
        name: out of COMPUTED.
        words: key=value words; there is nothing to set.
        out: a directory.

    Raises:
        ConfigError: a word was given, or data that the table is made of is not there.
    """
    if words:
        raise ConfigError(f"{name}: {words[0]!r}: it is made in one way alone and has no settings")
    table = COMPUTED[name][1]()
    table.write(out)
    print(table.markdown())
    return 0
