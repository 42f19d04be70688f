"""A sweep of request rates against one server: a table, a plot, and the highest rate that it sustains.

A rate is sustained when the load arrived as planned, at most 1 % of the requests failed, neither the queue nor the
latency grew to the end, and, where limits were given (--goodput), enough requests met them. The search doubles or
halves the rate until one is sustained and one is not, then takes their geometric mean, until they are near enough.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from research_engine.bench.result_file import rescue, write_bytes, write_text
from research_engine.bench.serve_options import ServeBenchOptions, TrafficOptions
from research_engine.bench.serve_report import errors_of, finite, result_path
from research_engine.bench.serve_result import DETAILS

MOST_FAILED = 0.01
GROWS = 0.05  # seconds of latency in a second of arrivals: the server does 1 / 1.05 of what is asked
_MOST_RUNS = 20
_INTERRUPTED = 130


class Measures(Protocol):
    """What a sweep needs of a client."""

    async def measure(self, traffic: TrafficOptions) -> dict[str, Any]: ...


class Bracket(NamedTuple):
    """Requests per second: the highest that was sustained and the lowest above it that was not; None: none was seen."""

    sustained: float | None
    failed: float | None


@dataclass(frozen=True)
class Sweep:
    """Its runs in order of rate, each a result with `sustained` and `why_not`; the saturation point between them."""

    runs: list[dict[str, Any]]
    saturation: Bracket
    interrupted: bool


async def run_sweep(client: Measures, options: ServeBenchOptions) -> int:
    """Measure every rate, print the table, and write the files if they are asked for. Returns an exit code."""
    sweep = await sweep_rates(client, options)
    console = Console()
    console.print(sweep_table(sweep, options))
    for run in sweep.runs:
        if math.isfinite(float(run["request_rate"])):
            for reason in run["why_not"]:
                print(f"{run['request_rate']:g} req/s is not sustained: {reason}")
        where = "all at once" if run["request_rate"] == "inf" else f"{run['request_rate']:g} req/s"
        for remark in [f"WARNING: {warning}" for warning in run["warnings"]] + errors_of(run):
            print(f"{where}: {remark}")
    print(saturation_line(sweep.saturation))
    if any(run["void"] for run in sweep.runs if run["request_rate"] == sweep.saturation.failed):
        print("At the rate that is not, the load did not arrive as planned: that limit may be the client's.")
    if options.report.save_result and sweep.runs:
        path = sweep_path(sweep, options)
        try:
            for written in write_sweep(sweep, options, path):
                print(f"wrote {written}")
        except OSError as error:
            rescue(path, sweep_json(sweep, options), error)
            return 1
    if sweep.interrupted:
        return _INTERRUPTED
    return 0 if any(run["completed"] for run in sweep.runs) else 1


async def sweep_rates(client: Measures, options: ServeBenchOptions) -> Sweep:
    """Measure the rates that the options name, or search for the saturation point."""
    traffic = options.traffic
    runs: list[dict[str, Any]] = []

    async def measured(rate: float) -> dict[str, Any]:
        count = traffic.num_prompts
        if traffic.sweep_duration is not None and math.isfinite(rate):
            count = max(1, math.ceil(rate * traffic.sweep_duration))
        warmups = traffic.num_warmups if not runs else 0
        one = replace(traffic, sweep_rates=None, request_rate=rate, num_prompts=count, num_warmups=warmups)
        result = await client.measure(one)
        reasons = why_not(result, traffic.sweep_attainment)
        result |= {"sustained": not reasons and math.isfinite(rate), "why_not": reasons}
        runs.append(result)
        return result

    interrupted = False
    if traffic.rates is not None:
        for rate in traffic.rates:
            interrupted = (await measured(rate))["interrupted"]
            if interrupted:
                break
    else:
        start = traffic.sweep_start
        if start is None:
            result = await measured(math.inf)
            interrupted = result["interrupted"]
            start = result["request_throughput"] / 2
        if not interrupted and start > 0:
            search = saturation_search(start, traffic.sweep_tolerance)
            next_rate: float | None = next(search, None)
            while next_rate is not None and not interrupted:
                result = await measured(next_rate)
                interrupted = result["interrupted"]
                try:
                    next_rate = search.send(result["sustained"])
                except StopIteration:
                    next_rate = None
    runs.sort(key=lambda run: float(run["request_rate"]))
    return Sweep(runs, bracket_of(runs), interrupted)


def saturation_search(start: float, tolerance: float) -> Generator[float, bool, None]:
    """Yields rates to try, is sent whether each was sustained, and ends when the point between is known well enough."""
    low: float | None = None
    high: float | None = None
    rate = _rounded(start)
    for _ in range(_MOST_RUNS):
        if (yield rate):
            low = rate if low is None else max(low, rate)
        else:
            high = rate if high is None else min(high, rate)
        if low is None:
            rate = _rounded(rate / 2)
        elif high is None:
            rate = _rounded(rate * 2)
        elif high <= low * (1 + tolerance) or _rounded(math.sqrt(low * high)) in (low, high):
            return
        else:
            rate = _rounded(math.sqrt(low * high))


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def bracket_of(runs: Sequence[Mapping[str, Any]]) -> Bracket:
    """The saturation point: sustained rates above one that was not don't count, they had luck."""
    rates = [(float(run["request_rate"]), run["sustained"]) for run in runs if run["request_rate"] != "inf"]
    failed = min((rate for rate, sustained in rates if not sustained), default=None)
    below = [rate for rate, sustained in rates if sustained and (failed is None or rate < failed)]
    return Bracket(max(below, default=None), failed)


def why_not(result: Mapping[str, Any], attainment: float) -> list[str]:
    """Reasons why the rate of this run is not sustained; empty when it is."""
    reasons = list(result["void"])
    ended = result["completed"] + result["failed"]
    if ended and result["failed"] > MOST_FAILED * ended:
        reasons.append(f"{result['failed']} of {ended} requests failed")
    if result["unstable"]:
        reasons.append("the queue grew to the end")
    if result["latency_growth"] > GROWS:
        reasons.append(f"latency grew by {result['latency_growth']:.2f} s in each second")
    met = result["slo_attainment"]
    if met is not None and met < attainment:
        reasons.append(f"{met:.0%} of the requests met the limits")
    if result["interrupted"]:
        reasons.append("interrupted")
    elif not ended:
        reasons.append("no request ended")
    return reasons


def saturation_line(point: Bracket) -> str:
    """The finding in one sentence."""
    if point.sustained is None and point.failed is None:
        return "saturation point: not known, no rate was measured"
    if point.sustained is None:
        return f"saturation point: below {point.failed:.4g} req/s, the lowest rate measured is not sustained"
    if point.failed is None:
        return f"saturation point: above {point.sustained:.4g} req/s, every rate measured is sustained"
    return f"saturation point: {point.sustained:.4g} req/s is sustained, {point.failed:.4g} req/s is not"


def rows_of(sweep: Sweep, options: ServeBenchOptions) -> list[dict[str, Any]]:
    """A row a run, by column; numbers not rounded."""
    tail = max(options.report.percentiles)
    rows = []
    for run in sweep.runs:
        row: dict[str, Any] = {
            "rate": run["request_rate"],
            "sent req/s": run["send_rate"],
            "completed": run["completed"],
            "failed": run["failed"],
            "finished req/s": run["request_throughput"],
            "tok/s": run["output_throughput"],
        }
        if run["request_goodput"] is not None:
            row |= {"goodput": run["request_goodput"], "in limits %": 100 * (run["slo_attainment"] or 0.0)}
        for name in options.report.metrics_of(options.target.is_streamed):
            row[f"{name} median ms"] = run[f"median_{name}_ms"]
            row[f"{name} P{tail:g} ms"] = run[f"p{tail:g}_{name}_ms"]
        verdict = "all at once" if run["request_rate"] == "inf" else "; ".join(run["why_not"]) or "yes"
        rows.append(row | {"sustained": verdict})
    return rows


def sweep_table(sweep: Sweep, options: ServeBenchOptions) -> Table:
    """For a terminal, latencies as median / highest percentile asked for; the reasons are told below it."""
    tail = max(options.report.percentiles)
    names = options.report.metrics_of(options.target.is_streamed)
    title = f"latencies in ms: median / P{tail:g}"  # which 80 columns hold one below the other
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1 if len(names) < 4 else 0, 0, 0), show_edge=False,
                  title=title, title_justify="left")  # fmt: skip
    has_limits = options.report.slo is not None
    limits = ["in\nlimits"] if has_limits else []
    for name in ("rate", "failed", "finished\nreq/s", "output\ntok/s", *limits):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name.upper(), justify="right")
    table.add_column("sustained", no_wrap=True)
    for row, run in zip(rows_of(sweep, options), sweep.runs, strict=True):
        cells = [_cell(row[name]) for name in ("rate", "failed", "finished req/s", "tok/s")]
        if has_limits:
            cells.append(f"{row['in limits %']:.0f} %")
        cells += [f"{_cell(row[f'{name} median ms'])} / {_cell(row[f'{name} P{tail:g} ms'])}" for name in names]
        table.add_row(*cells, "-" if run["request_rate"] == "inf" else "yes" if run["sustained"] else "no")
    return table


def sweep_path(sweep: Sweep, options: ServeBenchOptions) -> Path:
    """Of its JSON file."""
    return result_path(options, {**sweep.runs[0], "request_rate": "sweep"})


def sweep_json(sweep: Sweep, options: ServeBenchOptions) -> str:
    """All of it."""
    detailed = options.report.save_detailed
    runs = [{key: value for key, value in run.items() if detailed or key not in DETAILS} for run in sweep.runs]
    whole = {
        "saturation": sweep.saturation._asdict(),
        "interrupted": sweep.interrupted,
        "criterion": {"most_failed": MOST_FAILED, "attainment": options.traffic.sweep_attainment},
        "runs": runs,
    }
    return json.dumps(finite(whole), ensure_ascii=False) + "\n"


def write_sweep(sweep: Sweep, options: ServeBenchOptions, path: Path) -> list[Path]:
    """The runs as JSON, the table as Markdown and CSV, the plot as PNG, all beside each other."""
    rows = rows_of(sweep, options)
    write_text(path, sweep_json(sweep, options))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path.with_suffix(".csv"), buffer.getvalue())
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    lines += ["| " + " | ".join(map(_cell, row.values())) + " |" for row in rows]
    write_text(path.with_suffix(".md"), "\n".join([*lines, "", saturation_line(sweep.saturation), ""]))
    write_bytes(path.with_suffix(".png"), sweep_plot(sweep, options))
    return [path, *(path.with_suffix(suffix) for suffix in (".csv", ".md", ".png"))]


def sweep_plot(sweep: Sweep, options: ServeBenchOptions) -> bytes:
    """PNG: latency against rate, a panel a metric; hollow points are rates that are not sustained."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    names = list(options.report.metrics_of(options.target.is_streamed))
    runs = [run for run in sweep.runs if run["request_rate"] != "inf"]
    rates = [float(run["request_rate"]) for run in runs]
    tail = max(options.report.percentiles)
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(2.6 * len(names), 2.7), layout="constrained")
        for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            curves = (
                ("median", f"median_{name}_ms", "#0072B2", "-"),
                (f"P{tail:g}", f"p{tail:g}_{name}_ms", "#D55E00", "--"),
            )
            for label, key, color, line in curves:
                values = [run[key] for run in runs]
                axis.plot(rates, values, color=color, linestyle=line, linewidth=1.2, label=label)
                for rate, value, run in zip(rates, values, runs, strict=True):
                    axis.plot(rate, value, "o", color=color, markersize=4,
                              markerfacecolor=color if run["sustained"] else "white")  # fmt: skip
            if sweep.saturation.sustained is not None:
                axis.axvline(sweep.saturation.sustained, color="0.6", linewidth=0.8, linestyle=":")
            known = [run[key] for run in runs for _, key, _, _ in curves if run[key] > 0]
            axis.set(xlabel="request rate (1/s)", ylabel=f"{name.upper()} (ms)", xlim=(0, None))
            if known and max(known) > 20 * min(known):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
            else:
                axis.set_ylim(bottom=0)
        figure.axes[0].legend(frameon=False)
        figure.suptitle(saturation_line(sweep.saturation), fontsize=8, x=0.01, ha="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return "-" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
