"""Plots of runs over time: KV blocks, what steps are made of, how far apart clients are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.analysis.plots import STYLES, drawing, legend_below, line_style, save
from research_engine import metrics

if TYPE_CHECKING:
    from research_engine.engine.records import Records

_BINS = 80  # parts of a run that steps are averaged over
Runs = Mapping[str, "Records"]


def kv_over_time(runs: Runs, blocks: Mapping[str, int], title: str, path: Path) -> list[Path]:
    """Blocks that requests hold, in percent of the cache, and requests that wait.

    Args:
        runs: cell -> records of one trial.
        blocks: cell -> KV blocks of the cache.
        title: one line on top.
        path: without suffix.
    """
    with drawing(title, 3.6) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for index, (cell, records) in enumerate(runs.items()):
            times, used, waiting = _over_time(records, lambda step: (step.blocks_used, step.num_waiting))
            color, line = line_style(index)
            style: dict[str, Any] = {"color": color, "linestyle": line, "linewidth": 1.2, "drawstyle": "steps-mid"}
            upper.plot(times, 100 * used / blocks[cell], label=cell, **style)
            lower.plot(times, waiting, **style)
        upper.set(ylabel="KV blocks in use (%)", ylim=(0, 103))
        lower.set(ylabel="requests waiting", xlabel="time (s)", ylim=(0, None))
        legend_below(figure, upper)
        return save(figure, path)


def batch_composition(runs: Runs, title: str, path: Path) -> list[Path]:
    """Tokens of a step by what they are: of prompts, and of requests that already answer; a panel a cell."""
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    with drawing(title, 0.6 + 1.5 * rows) as figure:
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axis, (cell, records) in zip(axes, runs.items(), strict=False):
            prompts = {record.request_id: record.prompt_tokens for record in records.requests}
            times, prefill, decode = _over_time(records, lambda step, prompts=prompts: _split(step, prompts))
            axis.stackplot(times, decode, prefill, step="mid", labels=("decode", "prefill"),
                           colors=(STYLES[0][0], STYLES[5][0]), linewidth=0)  # fmt: skip
            axis.set_title(cell, loc="left")
        for index, axis in enumerate(axes):
            axis.set_visible(index < len(runs))
            if index + columns >= len(runs):
                axis.set_xlabel("time (s)")
                axis.tick_params(labelbottom=True)
            if index % columns == 0:
                axis.set_ylabel("tokens a step")
        legend_below(figure, axes[0])
        return save(figure, path)


def fairness_over_time(runs: Runs, title: str, path: Path, window: float = 60.0) -> list[Path]:
    """What each client received, and the difference between clients, as the VTC paper counts them (docs/metrics.md).

    Args:
        runs: cell -> records of one trial with several clients.
        title: one line on top.
        path: without suffix.
        window: seconds; a third of the load where it is shorter than three windows.
    """
    services = {cell: metrics.service_of(records) for cell, records in runs.items()}
    arrivals = [service.arrival for own in services.values() for service in own]
    start, end = min(arrivals), max(arrivals)
    window = min(window, (end - start) / 3)
    columns = min(3, len(runs))
    rows = -(-len(runs) // columns)
    with drawing(f"{title}  ·  windows of {window:.3g} s", 0.6 + 1.5 * (rows + 1)) as figure:
        grid = figure.add_gridspec(rows + 1, columns)
        first = None
        for index, (cell, own) in enumerate(services.items()):
            axis = figure.add_subplot(grid[index // columns, index % columns], sharey=first)
            first = first or axis
            times = np.linspace(start + window / 2, end - window / 2, 60)
            clients, received, _ = metrics.client_rates(own, times.tolist(), window=window)
            for number, client in enumerate(clients[:7]):
                color, style = line_style(number)
                axis.plot(times - start, received[number], color=color, linestyle=style, linewidth=1.2, label=client)
            axis.set_title(cell, loc="left")
            if index % columns == 0:
                axis.set_ylabel("received (tokens/s)")
        if first is not None:
            first.set_ylim(bottom=0)
        axis = figure.add_subplot(grid[rows, :])
        for index, (cell, own) in enumerate(services.items()):
            found = metrics.service_difference(own, window=window, start=start, end=end)
            color, style = line_style(index)
            axis.plot(
                np.array(found.times) - start,
                found.differences,
                color=color,
                linestyle=style,
                linewidth=1.3,
                label=cell,
            )
        axis.set(xlabel="time (s)", ylabel="difference (tokens/s)", ylim=(0, None))
        legend_below(figure, axis)
        if first is not None and len(first.get_legend_handles_labels()[1]) > 0:
            first.legend(frameon=False, loc="best", handlelength=3.2)
        return save(figure, path)


def _split(step: Any, prompts: Mapping[str, int]) -> tuple[int, int]:
    """Prompt tokens and others of a step."""
    prefill = 0
    for request_id, begin, count in zip(step.request_ids, step.starts, step.num_tokens, strict=True):
        prefill += max(0, min(begin + count, prompts.get(request_id, 0)) - begin)
    return prefill, sum(step.num_tokens) - prefill


def _over_time(records: Records, read: Any) -> Sequence[np.ndarray]:
    """Times of equal parts of the run, and two numbers averaged over the steps of each, weighted by their length."""
    steps = records.steps
    if not steps:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    start = steps[0].started
    width = max(steps[-1].finished - start, 1e-9) / _BINS
    sums, weights = np.zeros((2, _BINS)), np.zeros(_BINS)
    for step in steps:
        values, length = read(step), max(step.finished - step.started, 1e-12)
        at = min(_BINS - 1, int(((step.started + step.finished) / 2 - start) / width))
        weights[at] += length
        sums[:, at] += np.multiply(values, length)
    known = weights > 0
    times = (np.arange(_BINS) + 0.5) * width
    return times[known], *(sums[:, known] / weights[known])
