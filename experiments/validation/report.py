"""The validation's tables and plots: Markdown, CSV and LaTeX, and the distributions of both sides in one figure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.plots import line_style
from experiments.storage import write_text, write_with
from experiments.validation.comparison import DRAWS, LATENCIES, POINTS, RankAgreement, RunComparison, rank_agreement
from experiments.validation.recording import Recording
from experiments.validation.step_plot import plot_steps
from research_engine.other_load import DISTURBED_ABOVE
from research_engine.simulation.profiled import Profile

_SHOWN = ("throughput", *(f"{name}.{point}" for name in LATENCIES for point in ("p50", "p99")))
_LABELS = {"ttft": "TTFT (s)", "tpot": "TPOT (s)", "e2e": "E2E (s)"}
_NAMED = 6  # latencies beyond the bar
LATENCY_BAR = 0.05  # of a P50 or P99's signed error


def write_validation(recording: Recording, profile: Profile, found: Sequence[RunComparison], out: Path) -> list[str]:
    """Write the table (.md, .csv, .tex) and two plots (.png, .pdf), latency and steps; returns the table's lines."""
    lines = markdown(recording, profile, found)
    write_text(out / "table.md", "\n".join(lines) + "\n")
    write_text(out / "table.csv", to_csv(recording, found))
    write_text(out / "table.tex", to_latex(recording, found))
    plot(recording, found, out / "latency")
    plot_steps(recording, profile, out / "steps")
    return lines


def markdown(recording: Recording, profile: Profile, found: Sequence[RunComparison]) -> list[str]:
    """The table and what has to be said with it."""
    gpu = recording.machine.get("gpu", "a machine of an unknown name")
    lines = [f"**{recording.model} on {gpu}: signed error of the simulation against the real run**", ""]
    head = ["policy", "load", "throughput", *(f"{name.upper()} {point.upper()}" for name, point in _shown_latencies()),
            "TTFT P99 by chance", "steps, mean abs.", "steps, total", "verdict"]  # fmt: skip
    lines += ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    for item in found:
        cells = [item.run.scheduler, f"{item.run.load:.0%}", *(_percent(item.error(name)) for name in _SHOWN)]
        cells += [
            _range(item, "ttft.p99"),
            f"{item.forced['mape']:.1%}",
            _percent(item.forced["total_bias"]),
            verdict(item),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *notes(recording, profile, found)]
    return lines


def notes(recording: Recording, profile: Profile, found: Sequence[RunComparison]) -> list[str]:
    """Sentences below the table."""
    requests = sorted({len(item.run.requests) for item in found})
    held_out = profile.held_out
    said = [
        f"{_capacity(recording)}; {' or '.join(map(str, requests))} in each run.",
        "Latency and throughput: free-running simulation. Steps: the real run's batches, priced by the profile.",
    ]
    if held_out:
        said.append(f"The profile's own error on held-out steps: {held_out['mape']:.1%} mean absolute.")
    if any(item.by_chance for item in found):
        said.append(
            f"By chance: least and most in {DRAWS} simulations in which the device takes each step longer or shorter "
            f"at random, with a standard deviation of {held_out['mape']:.1%}; a real run is one such draw, too."
        )
    said += _outside(found)
    if profile.disturbance:
        said.append(f"WARNING: the profile was measured on a busy machine: {profile.disturbance}.")
    for ranks in rank_agreement(found):
        said += _ranks(ranks)
    if any((item.run.disturbed or 0.0) > DISTURBED_ABOVE for item in found):
        said.append(
            f"disturbed: other processes took more than {DISTURBED_ABOVE:.0%} of the cores during the real run."
        )
    return [f"{sentence}  " for sentence in said]


def verdict(item: RunComparison) -> str:
    """What speaks against the real run's numbers, or "ok"."""
    from research_engine.metrics import queue_trend

    trend, marks = queue_trend(item.run.requests), []
    if trend.grows:
        marks.append(f"unstable, {trend.growth:+.2f} requests/s")
    if item.run.disturbed is not None and item.run.disturbed > DISTURBED_ABOVE:
        marks.append(f"disturbed {item.run.disturbed:.0%}")
    return ", ".join(marks) or "ok"


def to_csv(recording: Recording, found: Sequence[RunComparison]) -> str:
    """Tidy: a row a policy, load and metric; least and most are errors by chance."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "model",
            "gpu",
            "scheduler",
            "load",
            "rate",
            "metric",
            "real",
            "simulated",
            "error",
            "least",
            "most",
            "verdict",
        ]
    )
    for item in found:
        own = [
            recording.model,
            recording.machine.get("gpu", ""),
            item.run.scheduler,
            item.run.load,
            f"{item.run.rate:.6g}",
        ]
        for metric in ("throughput", *(f"{name}.{point}" for name in LATENCIES for point in POINTS)):
            values = item.real_metrics[metric], item.simulated_metrics[metric], item.error(metric)
            ends = item.by_chance.get(metric, ())
            numbers = [f"{value:.6g}" for value in (*values, *ends)]
            writer.writerow([*own, metric, *numbers, *[""] * (2 - len(ends)), verdict(item)])
        forced = item.forced
        for metric, value in (
            ("step.mape", forced["mape"]),
            ("step.bias", forced["bias"]),
            ("step.total", forced["total_bias"]),
        ):
            writer.writerow([*own, metric, "", "", f"{value:.6g}", "", "", verdict(item)])
    return out.getvalue()


def to_latex(recording: Recording, found: Sequence[RunComparison]) -> str:
    """A booktabs table for \\input."""
    head = [
        "policy",
        "load",
        "thr.",
        *(f"{name.upper()} {point.upper()}" for name, point in _shown_latencies()),
        "steps",
    ]
    rows = [
        [item.run.scheduler, f"{item.run.load:.0%}", *(_percent(item.error(name)) for name in _SHOWN),
         f"{item.forced['mape']:.1%}"]
        for item in found
    ]  # fmt: skip
    caption = f"{recording.model} on {recording.machine.get('gpu', '')}: signed error of the simulation"
    body = [" & ".join(map(_tex, row)) + " \\\\" for row in rows]
    return "\n".join([
        "% needs \\usepackage{booktabs}", "\\begin{table}", "  \\centering", f"  \\caption{{{_tex(caption)}}}",
        f"  \\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}", "    \\toprule",
        "    " + " & ".join(map(_tex, head)) + " \\\\", "    \\midrule", *(f"    {line}" for line in body),
        "    \\bottomrule", "  \\end{tabular}", "\\end{table}", "",
    ])  # fmt: skip


def plot(recording: Recording, found: Sequence[RunComparison], path: Path) -> list[Path]:
    """Cumulative distributions of TTFT, TPOT and E2E: a row a policy, a colour a load, real solid, simulated dashed.

    Args:
        path: without suffix.

    Returns:
        The files written, .png and .pdf.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    policies = list(dict.fromkeys(item.run.scheduler for item in found))
    loads = sorted({item.run.load for item in found})
    figure = Figure(figsize=(7.2, 0.8 + 1.9 * len(policies)), layout="constrained")
    grid = figure.subplots(len(policies), len(LATENCIES), sharey=True, squeeze=False)
    for axes, policy in zip(grid, policies, strict=True):
        for axis, (name, metric) in zip(axes, LATENCIES.items(), strict=True):
            for item in (item for item in found if item.run.scheduler == policy):
                color = line_style(loads.index(item.run.load))[0]
                for requests, style in ((item.run.requests, "-"), (item.simulated, (0, (3, 1.5)))):
                    values = np.sort([x for x in map(metric, requests) if not math.isnan(x)])
                    share = np.arange(1, len(values) + 1) / max(1, len(values))
                    axis.plot(values, share, color=color, linestyle=style, linewidth=1.2, drawstyle="steps-post")
            _scale(axis, [x for i in found for r in (*i.run.requests, *i.simulated) if (x := metric(r)) > 0])
            axis.set(xlabel=_LABELS[name], ylim=(0, 1.02))
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=7)
            axis.xaxis.label.set_size(8)
        axes[0].set_ylabel(f"{policy}\nshare at or below", fontsize=8)
    handles = [Line2D([], [], color=line_style(i)[0], label=f"{load:.0%} of capacity") for i, load in enumerate(loads)]
    handles += [Line2D([], [], color="0.3", label="real"),
                Line2D([], [], color="0.3", linestyle=(0, (3, 1.5)), label="simulated")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(f"{recording.model}  ·  {recording.machine.get('gpu', '')}", fontsize=8, x=0.01, ha="left")
    files = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    for file in files:
        metadata: dict[str, Any] = {"CreationDate": None} if file.suffix == ".pdf" else {}
        write_with(file, partial(figure.savefig, dpi=150, metadata=metadata))
    return files


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values spread over more than a factor of 20."""
    if values and max(values) > 20 * float(np.percentile(values, 2)):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.set_xlim(left=0)


def _shown_latencies() -> list[tuple[str, str]]:
    return [(name, point) for name in LATENCIES for point in ("p50", "p99")]


def _capacity(recording: Recording) -> str:
    own = ", ".join(f"{name} {rate:.3f}" for name, rate in recording.capacities.items())
    return f"Capacity {recording.capacity:.3f} requests/s (all at once{'; least of ' if own else ''}{own})"


def _range(item: RunComparison, metric: str) -> str:
    ends = item.by_chance.get(metric)
    return "-" if ends is None else f"{_percent(ends[0])} to {_percent(ends[1])}"


def _outside(found: Sequence[RunComparison]) -> list[str]:
    """Which of the shown latencies are off by more than the bar, and whether chance alone may be."""
    metrics = [f"{name}.{point}" for name, point in _shown_latencies()]
    off = [(item, metric) for item in found for metric in metrics if abs(item.error(metric)) > LATENCY_BAR]
    said = [
        f"{metric.upper()} of {item.run.scheduler} at {item.run.load:.0%} ({_percent(item.error(metric))}"
        + (f", by chance {_range(item, metric)})" if metric in item.by_chance else ")")
        for item, metric in off
    ]
    count = f"Within {LATENCY_BAR:.0%}: {len(found) * len(metrics) - len(off)} of {len(found) * len(metrics)} latencies"
    more = [f"{len(said) - _NAMED} more"] if len(said) > _NAMED else []
    return [f"{count}; not {', '.join([*said[:_NAMED], *more])}." if said else f"{count}."]


def _ranks(ranks: RankAgreement) -> list[str]:
    swapped = f"; not {', '.join(ranks.swapped)}" if ranks.swapped else ""
    said = [
        f"At {ranks.load:.0%}, {one} and {other} decide alike in the simulation and have no ranks; if they did so in "
        f"reality, too, the noise of a real run is up to {apart:.1%} ({metric})."
        for one, other, apart, metric in ranks.same
    ]
    if ranks.pairs:
        said.append(
            f"At {ranks.load:.0%}, policies ranked alike in {ranks.alike} of {ranks.pairs} comparisons of two, and in "
            f"{ranks.clear_alike} of the {ranks.clear_pairs} more than 2 % apart{swapped}."
        )
    return said


def _percent(share: float) -> str:
    return f"{share:+.1%}"


def _tex(text: str) -> str:
    return "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text)
