"""What a run of the kernels' benchmark leaves behind: measurements, a table an op, kernels.csv, a roofline plot."""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from research_engine.bench.kernel_ops import OPS, Work
from research_engine.bench.kernel_problems import Sizes
from research_engine.bench.kernel_timing import quartiles

OURS = "research_engine"

COLUMNS = (
    "op", "shape", "path", "implementation", "dtype", "device", "status", "note", "relative_error", "repeats",
    "in_a_row", "median_us", "first_quartile_us", "third_quartile_us", "bytes", "operations", "bytes_per_second",
    "operations_per_second", "roofline_us", "roofline_percent", "bandwidth_ceiling", "bandwidth_ceiling_per_second",
    "product_ceiling_per_second", "launch_us",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kernel on one shape."""

    op: str
    sizes: Sizes
    path: str

    @property
    def shape(self) -> str:
        """As the command line takes it."""
        return OPS[self.op].shape(self.sizes)


@dataclass(frozen=True)
class Measurement:
    """One implementation's outcome on one case.

    Attributes:
        implementation: `OURS` or a peer's name.
        status: "ok"; "wrong": not timed, since it disagrees with the oracle; "refused": it does not take this case,
            or it does not fit into memory, or (a peer) whatever it raised; "failed".
        note: what was wrong, or why it was refused.
        relative_error: largest of the sampled rows, nan if it was not run.
        seconds: of each repeat; empty unless status is "ok".
    """

    case: Case
    implementation: str
    work: Work
    status: str
    note: str
    relative_error: float
    seconds: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median, third quartile of the seconds."""
        return quartiles(self.seconds)


@dataclass(frozen=True)
class KernelBenchResult:
    """All measurements of a run and what they are measured against.

    Attributes:
        ceilings: see `measure_ceilings`.
        device: its name in words.
        dtype: of all tensors.
        repeats: of each case.
        measurements: case by case, the project's own first.
        not_run: cases that were left when a fault made the device unusable.
        in_a_row: calls that followed one another in each repeat; the seconds are one call's.
    """

    ceilings: dict[str, float]
    device: str
    dtype: str
    repeats: int
    measurements: list[Measurement]
    not_run: int = 0
    in_a_row: int = 1

    def roofline_seconds(self, work: Work) -> float:
        """The least time that the measured ceilings allow for this work (Williams et al., "Roofline", 2009)."""
        in_memory = work.bytes / self.ceilings[work.bandwidth]
        return max(in_memory, work.operations / self.ceilings.get("product", float("inf")))

    @property
    def exit_code(self) -> int:
        """1 if a kernel of the project's is wrong or failed or cases were not run, 2 if it refused a shape, else 0."""
        states = {m.status for m in self.measurements if m.implementation == OURS}
        return 1 if states & {"wrong", "failed"} or self.not_run else 2 if "refused" in states else 0


def print_report(result: KernelBenchResult, console: Console) -> None:
    """A table an op: medians, interquartile ranges, rates, share of the roofline, a peer's time and that over ours."""
    each = f" of {result.in_a_row} calls in a row" if result.in_a_row > 1 else ""
    console.print(f"{escape(result.device)}, {result.dtype}, median of {result.repeats} runs{each} with cold caches")
    console.print(f"ceilings: {', '.join(_ceiling(name, value) for name, value in result.ceilings.items())}")
    for op in dict.fromkeys(m.case.op for m in result.measurements):
        _print_op(op, result, console)
    for m in result.measurements:
        if m.status != "ok" and (m.implementation == OURS or m.status == "wrong"):
            where = f"{m.case.op} {m.case.shape} {m.case.path}"
            console.print(escape(f"{m.status.upper()}: {m.implementation}, {where}: {m.note}"), style="red")
    if result.not_run:
        console.print(f"A fault made the device unusable: {result.not_run} cases were not run", style="red")
    refused = {(m.implementation, m.note) for m in result.measurements if m.status == "refused"}
    for name, note in sorted(pair for pair in refused if pair[0] != OURS):
        console.print(escape(f"{name} was not timed everywhere: {note}"))


def _print_op(op: str, result: KernelBenchResult, console: Console) -> None:
    mine = [m for m in result.measurements if m.case.op == op]
    ours = [m for m in mine if m.implementation == OURS]
    peers = list(dict.fromkeys(m.implementation for m in mine if m.implementation != OURS and m.status == "ok"))
    has_paths = {m.case.path for m in ours} != {"auto"}
    table = Table(title=op, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("shape", no_wrap=True)
    if has_paths:
        table.add_column("path", no_wrap=True)
    for name in ("us", "IQR", "B/s", "op/s", "roof", *(f"{name} us, ratio" for name in peers)):
        table.add_column(name, justify="right", no_wrap=name in ("us", "IQR", "B/s", "op/s", "roof"))
    ratios: dict[str, list[float]] = {name: [] for name in peers}
    for m in ours:
        cells = [m.case.shape, m.case.path] if has_paths else [m.case.shape]
        cells += _times(result, m)
        for name in peers:
            theirs = next((t for t in mine if t.implementation == name and t.case == m.case), None)
            if theirs is None or theirs.status != "ok":
                cells.append("-" if theirs is None else theirs.status)
                continue
            ratios[name].append(theirs.quartiles[1] / m.quartiles[1])
            cells.append(f"{microseconds(theirs.quartiles[1])}, {ratios[name][-1]:.2f}")
        table.add_row(*cells)
    console.print(table)
    for name, values in ratios.items():
        if len(values) > 1:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            console.print(f"{name} / ours: geometric mean {mean:.3f}, from {min(values):.2f} to {max(values):.2f}")


def _times(result: KernelBenchResult, m: Measurement) -> list[str]:
    if m.status != "ok":
        return [m.status, "", "", "", ""]
    first, median, third = m.quartiles
    operations = si(m.work.operations / median) if m.work.operations else "-"
    share = f"{result.roofline_seconds(m.work) / median:.0%}"
    return [microseconds(median), microseconds(third - first), si(m.work.bytes / median), operations, share]


def microseconds(seconds: float) -> str:
    """In microseconds: one decimal below 1,000."""
    return f"{seconds * 1e6:,.1f}" if seconds < 1e-3 else f"{seconds * 1e6:,.0f}"


def si(value: float) -> str:
    """Three digits and a decimal prefix: 4.28e12 is "4.28T"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}"


def _ceiling(name: str, value: float) -> str:
    if name == "launch":
        return f"smallest launch {value * 1e6:.1f} us (inside every time)"
    return f"{name} {si(value)}{'op' if name == 'product' else 'B'}/s"


def write_csv(result: KernelBenchResult, path: Path) -> Path:
    """One line for every implementation of every case. The file is there whole or not at all. Returns the path."""

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(csv_row(result, m) for m in result.measurements)

    return _write_whole(path, write)


def csv_row(result: KernelBenchResult, m: Measurement) -> dict[str, object]:
    """The values of `COLUMNS`; those of time are empty unless it was timed."""
    row: dict[str, object] = {
        "op": m.case.op,
        "shape": m.case.shape,
        "path": m.case.path if m.implementation == OURS else "",
        "implementation": m.implementation,
        "dtype": result.dtype,
        "device": result.device,
        "status": m.status,
        "note": m.note,
        "relative_error": m.relative_error,
        "repeats": result.repeats,
        "in_a_row": result.in_a_row,
        "bytes": m.work.bytes,
        "operations": m.work.operations,
        "roofline_us": result.roofline_seconds(m.work) * 1e6,
        "bandwidth_ceiling": m.work.bandwidth,
        "bandwidth_ceiling_per_second": result.ceilings[m.work.bandwidth],
        "product_ceiling_per_second": result.ceilings.get("product", ""),
        "launch_us": result.ceilings["launch"] * 1e6,
    }
    if m.status == "ok":
        first, median, third = m.quartiles
        row.update(
            median_us=median * 1e6,
            first_quartile_us=first * 1e6,
            third_quartile_us=third * 1e6,
            bytes_per_second=m.work.bytes / median,
            operations_per_second=m.work.operations / median,
            roofline_percent=100 * result.roofline_seconds(m.work) / median,
        )
    return row


def write_plot(result: KernelBenchResult, path: Path) -> Path | None:
    """The roofline plot: operations per second over operations per byte. None when no op that computes was timed."""
    from matplotlib.figure import Figure

    timed = [m for m in result.measurements if m.status == "ok" and m.work.operations]
    if not timed:
        return None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations per second")
    intensities = [m.work.operations / m.work.bytes for m in timed]
    low, high = min(intensities) / 2, max(intensities) * 2
    product = result.ceilings.get("product", math.inf)
    for name in dict.fromkeys(m.work.bandwidth for m in timed):
        rate = result.ceilings[name]
        ridge = min(max(product / rate, low), high)
        line = [(x, min(rate * x, product)) for x in (low, ridge, high)]
        axes.plot(*zip(*line, strict=True), color="black", linewidth=1, label=f"{name}: {si(rate)}B/s")
    if math.isfinite(product):
        axes.axhline(product, color="black", linewidth=1, linestyle="--", label=f"product: {si(product)}op/s")
    series = dict.fromkeys((m.case.op, m.implementation) for m in timed)
    for index, (op, implementation) in enumerate(series):
        points = [m for m in timed if (m.case.op, m.implementation) == (op, implementation)]
        color = f"C{list(dict.fromkeys(key[0] for key in series)).index(op)}"
        axes.scatter(
            [m.work.operations / m.work.bytes for m in points],
            [m.work.operations / m.quartiles[1] for m in points],
            marker="o" if implementation == OURS else "sD^v"[index % 4],
            facecolors=color if implementation == OURS else "none",
            edgecolors=color,
            label=f"{op}, {implementation}",
        )
    axes.set_title(f"{result.device}, {result.dtype}", fontsize="small")
    axes.legend(fontsize="x-small")
    return _write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Writes beside the path and moves the file there when it is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
