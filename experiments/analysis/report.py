"""A run directory's tables, plots, results.parquet and report.html, made from its files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis import plots, plots_of_cells, plots_over_time
from experiments.analysis.html import to_html
from experiments.analysis.metrics import METRICS, USUAL
from experiments.analysis.paper_table import paper_table
from experiments.analysis.run_files import RunFiles
from experiments.analysis.table_formats import to_csv, to_latex, to_markdown
from experiments.analysis.tables import Table, build_effects, build_table
from experiments.analysis.verdicts import tail_metrics, verdict_lines
from experiments.storage import write_text, write_with

FILES = {"latency_cdf": "latency"}  # plot -> file name, where it is not its kind


def write_report(directory: Path) -> Table | None:
    """Write tables (.md .csv .tex), results.parquet, plots and report.html of what has finished so far.

    A reproduction's paper.md, too.

    Returns:
        The table, or None while no trial has finished.

    Raises:
        ConfigError: the directory is no run.
    """
    run = RunFiles.of(directory)
    if not run.summaries:
        return None
    outputs = run.config.get("outputs") or {}
    notes = [*run.environment_notes, *_notes(run)]
    table = build_table(run.title, run.cells, outputs.get("table"), notes, run.baseline)
    tables = {"table": table}
    effects = build_effects(run.title, run.cells, run.baseline, outputs.get("table"), run.environment_notes)
    if effects is not None:
        tables["effects"] = effects
    for name, made in tables.items():
        write_text(directory / f"{name}.md", to_markdown(made))
        write_text(directory / f"{name}.tex", to_latex(made))
    write_text(directory / "table.csv", to_csv(run.cells, run.baseline))
    reproduction = paper_table(run)
    if reproduction is not None:
        reproduction.write(directory)
    write_with(directory / "results.parquet", partial(_write_results, run))
    files, untold = _plots(run, outputs.get("plots"))
    write_text(directory / "report.html", to_html(run, list(tables.values()), files, untold, reproduction))
    return table


def _write_results(run: RunFiles, path: Path) -> None:
    """A row a finished trial: what it is, and every metric, also those that too few values support."""
    import pandas as pd

    rows = []
    for trial in run.finished():
        summary = run.summary(trial)
        row: dict[str, Any] = {"cell": trial["cell"], "seed": trial["seed"], "repeat": trial.get("repeat", 0)}
        row |= {f"factor_{name}": label for name, label in trial["levels"].items()}
        row |= {name: summary[name] for name in ("kind", "machine", "void", "unstable", "disturbed")}
        row |= {name: metric.read(summary) for name, metric in METRICS.items()}
        rows.append(row | {"directory": trial["directory"]})
    pd.DataFrame(rows).to_parquet(path, index=False)


def _plots(run: RunFiles, wanted: Sequence[Mapping[str, Any]] | None) -> tuple[list[Path], list[str]]:
    """The PNG files of the plots, and why others were not made."""
    if wanted is None:
        wanted = [{"kind": "bars" if run.config.get("measures") == "kernels" else "latency_cdf"}]
    made, untold, taken = [], [], set()
    for plot in wanted:
        name = FILES.get(plot["kind"], plot["kind"])
        while name in taken:
            name += "_2"
        taken.add(name)
        try:
            made += [file for file in _plot(run, plot, run.directory / name) if file.suffix == ".png"]
        except _CannotPlot as error:
            untold.append(f"{plot['kind']} was not drawn: {error}")
            for suffix in (".png", ".pdf"):
                (run.directory / f"{name}{suffix}").unlink(missing_ok=True)
    return made, untold


class _CannotPlot(Exception):
    """The run has nothing that this plot shows."""


def _plot(run: RunFiles, plot: Mapping[str, Any], path: Path) -> list[Path]:
    kind, cells, title = plot["kind"], [cell for cell in run.cells if cell.summaries], run.caption
    if kind == "bars":
        name = plot.get("metric") or _usual_metric(run)
        return plots_of_cells.bars(cells, name, _with_verdicts(run, [name]), path)
    if kind == "latency_load":
        x = _factor(run, plot.get("x"), "latency_load needs a factor of numbers", numeric=True)
        names = [plot["metric"]] if plot.get("metric") else _load_metrics(run)
        return plots_of_cells.latency_load(cells, x, names, _with_verdicts(run, names), path)
    if kind == "heatmap":
        x = _factor(run, plot.get("x"), "a heat map needs two factors")
        y = _factor(run, plot.get("y"), "a heat map needs two factors", without=x)
        name = plot.get("metric") or _usual_metric(run)
        return plots_of_cells.heatmap(cells, x, y, name, _with_verdicts(run, [name]), path)
    if run.config.get("measures") == "kernels":
        raise _CannotPlot("kernels serve no requests")
    if kind == "pareto":
        return plots_of_cells.pareto(cells, _with_verdicts(run, plots_of_cells.OF_PARETO), path)
    if kind == "latency_cdf":
        shown = (run.config.get("outputs") or {}).get("table") or USUAL
        names = tail_metrics([latency for latency, _ in plots.PANELS], shown, run.cells, run.baseline)
        return plots.latency_cdf(_latencies(run), _with_verdicts(run, names), path)
    first, runs = run.first_of_each_cell(), run.first_records
    if len(first) > len(runs):
        title += f"  ·  the first {len(runs)} of {len(first)} cells"
    if kind == "batch_composition":
        return plots_over_time.batch_composition(runs, title, path)
    if kind == "kv_over_time":
        blocks = {cell: run.summary(first[cell])["num_blocks"] for cell in runs}
        return plots_over_time.kv_over_time(runs, blocks, title, path)
    if any(len({record.client for record in records.requests}) < 2 for records in runs.values()):
        raise _CannotPlot("fairness_over_time needs at least two clients (workload.clients)")
    return plots_over_time.fairness_over_time(runs, title, path)


def _with_verdicts(run: RunFiles, names: Sequence[str]) -> str:
    """The caption, and below it what the tables say of the metrics that are plotted."""
    return "\n".join([run.caption, *verdict_lines(run.cells, run.baseline, names)])


def _factor(run: RunFiles, wanted: str | None, why: str, *, without: str = "", numeric: bool = False) -> str:
    factors = plots_of_cells.numeric_factors(run.cells) if numeric else list(run.config.get("factors") or {})
    several = {name for name in factors if len({cell.levels.get(name) for cell in run.cells}) > 1}
    factors = sorted((name for name in factors if name != without), key=lambda name: name not in several)
    if wanted is not None and wanted not in factors:
        raise _CannotPlot(f"{why}; {wanted!r} is none")
    if not factors:
        raise _CannotPlot(why)
    return wanted or factors[0]


def _usual_metric(run: RunFiles) -> str:
    return "kernel_time_p50" if run.config.get("measures") == "kernels" else "ttft_p50"


def _load_metrics(run: RunFiles) -> list[str]:
    if run.config.get("measures") == "kernels":
        return ["kernel_time_p50", "kernel_bandwidth"]
    return ["ttft_p90", "tpot_p90", "normalized_latency_mean"]


def _latencies(run: RunFiles) -> dict[str, dict[str, list[float]]]:
    """Cell -> latency -> seconds of completed requests, pooled over the finished seeds."""
    out: dict[str, dict[str, list[float]]] = {}
    for trial in run.finished():
        columns = ["completed", "ttft", "e2e", "token_times"]
        done = run.frame(trial, "requests", columns).query("completed")
        pooled = out.setdefault(trial["cell"], {"ttft": [], "itl": [], "e2e": []})
        pooled["ttft"] += done["ttft"].tolist()
        pooled["e2e"] += done["e2e"].tolist()
        for times in done["token_times"]:
            pooled["itl"] += np.diff(times).tolist()
    return out


def _notes(run: RunFiles) -> list[str]:
    origins = sorted({f"{s['workload']['num_requests']} requests, {s['workload']['origin']}"
                      for s in run.summaries if "kernel" not in s})  # fmt: skip
    if origins:
        return [f"Workload: {'; '.join(origins)}."]
    return [f"Median of {run.summaries[0]['workload']['num_requests']} runs a trial, each with cold caches."]
