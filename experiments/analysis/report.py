"""A run directory's tables and plots, made from its files alone: config.yaml, trials.json and the trials' own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.analysis import plots
from experiments.analysis.tables import CellResults, Table, build_table, to_csv, to_latex, to_markdown
from experiments.storage import read_summary, write_text
from research_engine import metrics

PLOTS = {"latency_cdf": "latency"}  # plot -> file name


def write_report(run: Path) -> Table | None:
    """Write table.md, table.csv, table.tex and the plots of what has finished so far.

    Returns:
        The table, or None while no trial has finished.
    """
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    plan = json.loads((run / "trials.json").read_text(encoding="utf-8"))
    cells = read_cells(run, plan)
    if not any(cell.summaries for cell in cells):
        return None
    table = build_table(_title(config), cells, config["outputs"]["table"], _notes(cells))
    baseline = next(
        (cell for cell in cells if config["baseline"] and config["baseline"].items() <= cell.levels.items()), None
    )
    write_text(run / "table.md", to_markdown(table))
    write_text(run / "table.tex", to_latex(table))
    write_text(run / "table.csv", to_csv(cells, baseline))
    for plot in config["outputs"]["plots"]:
        plots.latency_cdf(_latencies(run, plan), _plot_title(config, cells), run / PLOTS[plot])
    return table


def read_cells(run: Path, plan: Sequence[dict[str, Any]]) -> list[CellResults]:
    """The cells of a plan in its order, with the summaries of their finished trials."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for trial in plan:
        grouped.setdefault(trial["cell"], []).append(trial)
    cells = []
    for label, trials in grouped.items():
        found = {trial["seed"]: read_summary(run / "trials" / trial["directory"]) for trial in trials}
        done = {seed: summary for seed, summary in found.items() if summary is not None}
        cells.append(CellResults(label, trials[0]["levels"], done, len(trials)))
    return cells


def _latencies(run: Path, plan: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Cell -> latency -> seconds of completed requests, pooled over the finished seeds."""
    import pandas as pd

    out: dict[str, dict[str, list[float]]] = {}
    for trial in plan:
        folder = run / "trials" / trial["directory"]
        if read_summary(folder) is None:
            continue
        frames = [pd.read_parquet(folder / f"{name}.parquet") for name in ("requests", "steps")]
        records = metrics.read_frames(*frames)
        done = [record for record in records.requests if metrics.is_completed(record)]
        pooled = out.setdefault(trial["cell"], {"ttft": [], "itl": [], "e2e": []})
        pooled["ttft"] += [metrics.ttft(record) for record in done]
        pooled["e2e"] += [metrics.e2e(record) for record in done]
        pooled["itl"] += metrics.inter_token_latencies(records)
    return out


def _title(config: dict[str, Any]) -> str:
    return f"{config['name']}: {config['description']}" if config["description"] else config["name"]


def _plot_title(config: dict[str, Any], cells: Sequence[CellResults]) -> str:
    summaries = [summary for cell in cells for summary in cell.summaries.values()]
    machines = ", ".join(sorted({f"{summary['kind']}: {summary['machine']}" for summary in summaries}))
    models = config["base"].get("model", "")
    return f"{config['name']}  ·  {models}  ·  {machines}"


def _notes(cells: Sequence[CellResults]) -> list[str]:
    summaries = [summary for cell in cells for summary in cell.summaries.values()]
    origins = sorted({f"{s['workload']['num_requests']} requests, {s['workload']['origin']}" for s in summaries})
    return [f"Workload: {'; '.join(origins)}."]
