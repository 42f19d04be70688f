"""What all plots share, and the distributions: PNG and PDF, colour-blind safe, told apart without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.storage import write_with

# Okabe and Ito's colours, darkest first, each with a line style and a marker of its own for print without colour.
STYLES: tuple[tuple[str, Any], ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (1.2, 1))),
    ("#CC79A7", (0, (5, 1.5, 1.2, 1.5))),
    ("#000000", (0, (3, 1, 1, 1, 1, 1))),
    ("#E69F00", (0, (8, 2))),
    ("#56B4E9", (0, (2, 2))),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 7.2  # inches: a paper's two columns
LINE = 122  # letters of a title's line
_LINE_HEIGHT = 0.14  # inches
PANELS = (("ttft", "TTFT (s)"), ("itl", "inter-token latency (s)"), ("e2e", "end-to-end latency (s)"))
_SETTINGS = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "pdf.fonttype": 42,  # text stays text
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def line_style(index: int) -> tuple[str, Any]:
    """Colour and line of curve `index`; the second round of colours has other lines, so that 49 curves all differ."""
    around, at = divmod(index, len(STYLES))
    return STYLES[at][0], STYLES[(at + 3 * around) % len(STYLES)][1]


def marker(index: int) -> str:
    """Of curve `index`, as its line."""
    around, at = divmod(index, len(MARKERS))
    return MARKERS[(at + 3 * around) % len(MARKERS)]


@contextmanager
def drawing(title: str, height: float) -> Iterator[Any]:
    """An empty figure of the paper's width, in the project's style, with its title on top.

    Args:
        title: one line, which goes on below where it is long; each further line makes the figure higher.
        height: inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS):
        first, *further = (textwrap.wrap(line, LINE) for line in title.split("\n"))
        more = [line for wrapped in further for line in wrapped]
        figure = Figure(figsize=(WIDTH, height + _LINE_HEIGHT * len(more)), layout="constrained")
        figure.suptitle("\n".join([*first, *more]), fontsize=8, x=0.01, ha="left")
        yield figure


def legend_below(figure: Any, axis: Any) -> None:
    """One legend for all panels; the figure grows by its rows."""
    handles, labels = axis.get_legend_handles_labels()
    if not labels:
        return
    longest = max(map(len, labels))
    columns = max(1, min(len(labels), int(105 / (longest + 9))))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.16 * (rows - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)


def save(figure: Any, path: Path) -> list[Path]:
    """Write path.png and path.pdf; the same figure gives the same bytes."""
    files = [path.with_name(path.name + suffix) for suffix in (".png", ".pdf")]
    for file in files:
        metadata: dict[str, Any] = {"CreationDate": None} if file.suffix == ".pdf" else {}
        write_with(file, partial(figure.savefig, dpi=200, metadata=metadata))
    return files


def latency_cdf(latencies: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path) -> list[Path]:
    """Cumulative distributions of TTFT, ITL and E2E, a line a cell.

    Args:
        latencies: cell -> "ttft", "itl", "e2e" -> seconds, pooled over seeds.
        title: one line on top.
        path: without suffix.

    Returns:
        The files written: path.png and path.pdf.
    """
    with drawing(title, 2.7) as figure:
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (name, label) in zip(axes, PANELS, strict=True):
            for share in (0.5, 0.9, 0.99):
                axis.axhline(share, color="0.85", linewidth=0.6, zorder=0)
            for index, (cell, values) in enumerate(latencies.items()):
                color, style = line_style(index)
                x, y = _steps(values[name])
                axis.plot(x, y, color=color, linestyle=style, linewidth=1.4, drawstyle="steps-post", label=cell)
            _scale(axis, [value for values in latencies.values() for value in values[name]])
            axis.set(xlabel=label, ylim=(0, 1.02))
        axes[0].set_ylabel("share at or below")
        axes[0].set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1.0])
        legend_below(figure, axes[0])
        return save(figure, path)


def _steps(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    ordered = ordered[~np.isnan(ordered)]
    share = np.arange(1, ordered.size + 1) / max(1, ordered.size)
    return np.concatenate([ordered[:1], ordered]), np.concatenate([[0.0], share])


def _scale(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values spread over more than a factor of 20; from 0 otherwise."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * np.percentile(positive, 2):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.set_xlim(left=0)
        axis.locator_params(axis="x", nbins=5)  # of numbers as long as 0.0025 more run into one another
