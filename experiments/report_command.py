"""`research-engine report RUN...`: makes tables, plots and the page of finished runs again, from their files alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro


def main(runs: Annotated[tuple[Path, ...], tyro.conf.Positional]) -> int:
    """Remake everything that is made of a run's files: table, effects, results.parquet, plots and report.html.

    Args:
        runs: run directories.
    """
    from rich.console import Console

    from experiments.analysis.report import write_report
    from experiments.analysis.table_formats import to_rich

    if not runs:
        raise ValueError("runs: name at least one run directory")
    console, code = Console(highlight=False), 0
    for run in runs:
        table = write_report(run)
        if table is None:
            print(f"{run}: no trial has finished", file=sys.stderr)
            code = 1
            continue
        console.print(to_rich(table, console.width))
        console.print(f"{run / 'report.html'} and what lies beside it are made again", markup=False)
    return code
