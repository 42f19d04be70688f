"""A request's life as a timeline, beside those it had to do with: for the terminal, and as a picture file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from .life import Admission, Eviction, Life, Span

# kind -> sign, colour of the terminal, colour of the picture (Okabe and Ito's), hatch for print without colour
LOOKS = {
    "waiting": ("·", "bright_black", "#D9D9D9", ""),
    "prefill": ("▒", "blue", "#0072B2", "//"),
    "decode": ("█", "green", "#009E73", ""),
    "paused": ("-", "yellow", "#E69F00", "xx"),
}
_IMPORTANCE = ("waiting", "decode", "prefill", "paused")  # of two in one cell the later is shown


def terminal(life: Life, width: int) -> Text:
    """One line a request, an axis below it, and what the signs mean.

    Args:
        width: columns of the terminal, at least 40.
    """
    rows, (start, end) = _rows(life), _extent(life)
    label = min(24, max(len(name) for name, _ in rows) + 1)
    columns = max(16, width - label - 2)
    scale = columns / (end - start)
    text = Text()
    for name, spans in rows:
        cells = [(" ", "")] * columns
        for kind in _IMPORTANCE:
            for span in (span for span in spans if span.kind == kind):
                first, last = int((span.start - start) * scale), int((span.end - start) * scale)
                for at in range(max(0, first), min(columns, max(last, first + 1))):
                    cells[at] = LOOKS[kind][:2]
        if name == life.record.request_id:
            for event in life.events:
                if isinstance(event, Eviction):
                    cells[min(columns - 1, int((event.time - start) * scale))] = ("X", "bold red")
        text.append(f"{name[: label - 1]:<{label}}", "bold" if name == life.record.request_id else "")
        for sign, style in cells:
            text.append(sign, style)
        text.append("\n")
    left, right = f"{0:g} s", f"{end - start:.4g} s"
    text.append(" " * label + left + " " * max(1, columns - len(left) - len(right)) + right + "\n", "bright_black")
    legend = [f"{sign} {kind}" for kind, (sign, *_) in LOOKS.items()] + ["X preempted"]
    text.append(" " * label + "   ".join(legend) + "\n", "bright_black")
    return text


def draw(life: Life, path: Path) -> None:
    """Write the timeline as a picture; the suffix (.png, .pdf, .svg) says of which kind."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows, (start, end) = _rows(life), _extent(life)
    with mpl.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.4}):
        figure = Figure(figsize=(7.2, 0.9 + 0.24 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for at, (name, spans) in enumerate(rows):
            height = 0.8 if name == life.record.request_id else 0.55
            for span in spans:
                _, _, color, hatch = LOOKS[span.kind]
                length = max(span.end - span.start, (end - start) / 2000)
                axis.barh(
                    at, length, left=span.start - start, height=height, color=color, hatch=hatch, edgecolor=color,
                    linewidth=0,
                )  # fmt: skip
        admitted = [event.time - start for event in life.events if isinstance(event, Admission)]
        preempted = [event.time - start for event in life.events if isinstance(event, Eviction)]
        for times, marker, color, y in ((admitted, "^", "black", 0.5), (preempted, "v", "#D55E00", -0.5)):
            label = "admitted" if times is admitted else "preempted"
            axis.plot(times, [y] * len(times), marker, color=color, markersize=4, zorder=3, clip_on=False, label=label)
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.set(xlim=(0, end - start), ylim=(len(rows) - 0.4, -0.7))
        axis.set_xlabel(f"seconds since {life.record.request_id} arrived")
        handles: list[Any] = [Patch(facecolor=color, hatch=hatch, edgecolor="white", label=kind)
                              for kind, (_, _, color, hatch) in LOOKS.items()]  # fmt: skip
        handles += axis.get_legend_handles_labels()[0]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=7)
        figure.savefig(path, dpi=200)


def _rows(life: Life) -> list[tuple[str, Sequence[Span]]]:
    return [(life.record.request_id, life.spans), *life.others.items()]


def _extent(life: Life) -> tuple[float, float]:
    """From its arrival to its end; others are shown as far as they lie within."""
    start = life.record.arrival_time
    end = max([start, life.record.finish_time or start, *(span.end for span in life.spans)])
    return start, end if end > start else start + 1e-9
