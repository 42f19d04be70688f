"""Where single steps are foretold wrongly: the error of every recorded step over its real time, by kind of step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.plots import line_style
from experiments.storage import write_with
from experiments.validation.recording import Recording
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import StepKind
from research_engine.simulation.timeline import step_times

_LIMIT = 0.3  # errors beyond it are drawn at the edge


def errors_by_kind(recording: Recording, profile: Profile) -> dict[StepKind, tuple[np.ndarray, np.ndarray]]:
    """Real seconds and signed errors of all recorded steps, teacher-forced; kinds without steps are left out."""
    cost, found = ProfiledCost(profile), {}
    real, foretold, kinds = [], [], []
    for run in recording.runs:
        seconds = step_times([step.timed for step in run.steps], cost, overlap=recording.engine.overlap)
        real.append(seconds[0])
        foretold.append(seconds[1])
        kinds += [profile.ladders.kind(step.work) for step in run.steps]
    all_real, all_foretold = np.concatenate(real), np.concatenate(foretold)
    for kind in StepKind:
        own = np.array([other is kind for other in kinds])
        if own.any():
            found[kind] = all_real[own], all_foretold[own] / all_real[own] - 1
    return found


def plot_steps(recording: Recording, profile: Profile, path: Path) -> list[Path]:
    """A dot a step, a panel a kind, with the share of steps within 4 %.

    Args:
        path: without suffix.

    Returns:
        The files written, .png and .pdf.
    """
    from matplotlib.figure import Figure

    found = errors_by_kind(recording, profile)
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    grid: Sequence[Any] = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for index, (axis, (kind, (real, errors))) in enumerate(zip(grid, found.items(), strict=True)):
        axis.axhspan(-4, 4, color="0.9", linewidth=0)
        shown = 100 * np.clip(errors, -_LIMIT, _LIMIT)
        axis.plot(1e3 * real, shown, ".", markersize=2, alpha=0.4, color=line_style(index)[0], rasterized=True)
        mape, within = np.abs(errors).mean(), (np.abs(errors) <= 0.04).mean()
        axis.set_title(f"{kind.value}: {len(real)} steps\nmean abs. {mape:.1%}, {within:.0%} within 4 %", fontsize=8)
        axis.set_xlabel("real step time (ms)", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set(xlim=(0, 1e3 * float(np.percentile(real, 99.5))), ylim=(-100 * _LIMIT, 100 * _LIMIT))
        axis.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("error (%)", fontsize=8)
    files = [path.with_suffix(".png"), path.with_suffix(".pdf")]
    for file in files:
        metadata: dict[str, Any] = {"CreationDate": None} if file.suffix == ".pdf" else {}
        write_with(file, partial(figure.savefig, dpi=150, metadata=metadata))
    return files
