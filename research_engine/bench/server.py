"""What the server costs: requests and tokens a second around an engine that computes nothing, against a baseline.

The baseline is FastAPI with the engine in its event loop, in one process (server_baseline.py). Client and servers share
the machine; the sides take turns, and medians are reported.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.bench.cpu import cpu_name
from research_engine.bench.server_load import LoadResult, closed_loop, http_request, open_loop
from research_engine.other_load import usable_cores

SIDES = ("server", "baseline")


@dataclass(frozen=True)
class ServerBenchOptions:
    """What to measure.

    Args:
        connections: asking at once.
        seconds: of each measurement.
        tokens: of an answer that comes whole.
        stream_tokens: of a streamed one.
        repeats: of each measurement.
        rate: requests a second at which latency is measured; half of each side's own rate when 0.
        soak: instead, keep streams, slow readers and disconnects up for that many seconds, and watch for leaks.
        streams: at once in the soak.
    """

    connections: int = 64
    seconds: float = 4.0
    tokens: int = 16
    stream_tokens: int = 256
    repeats: int = 3
    rate: float = 0.0
    soak: float = 0.0
    streams: int = 1000

    def __post_init__(self) -> None:
        for name in ("connections", "tokens", "stream_tokens", "repeats", "streams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds = {self.seconds}: must be finite and > 0")
        for name in ("rate", "soak"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be finite and >= 0")


def main(options: Annotated[ServerBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Requests and streamed tokens a second of the HTTP server around a stub engine, against a plain FastAPI server."""
    console = Console()
    if options.soak:
        from research_engine.bench.server_soak import soak

        return soak(options.soak, options.streams, console)
    report(options, run(options), console)
    return 0


@dataclass(frozen=True)
class Rates:
    """Of one side, one entry a repeat: requests a second; streamed tokens and events a second; latencies in seconds.

    Latencies are those of requests for `tokens` tokens at the rate of the options, from the scheduled time.
    """

    whole: list[float]
    streamed: list[float]
    events: list[float]
    median_latency: list[float]
    p99_latency: list[float]


def run(options: ServerBenchOptions) -> dict[str, Rates]:
    """Measure both sides in turn."""
    rates = {side: Rates([], [], [], [], []) for side in SIDES}
    body = {"model": "stub", "prompt": "The quick brown fox jumps over the lazy dog", "ignore_eos": True}
    whole = http_request("/v1/completions", {**body, "max_tokens": options.tokens})
    streamed = http_request("/v1/completions", {**body, "max_tokens": options.stream_tokens, "stream": True})
    for _ in range(options.repeats):
        for side in SIDES:
            with running(side) as port:
                mine = rates[side]
                _run(closed_loop(port, whole, connections=options.connections, seconds=0.5))  # warm-up
                result = _run(closed_loop(port, whole, connections=options.connections, seconds=options.seconds))
                mine.whole.append(_checked(result).requests / result.seconds)
                result = _run(closed_loop(port, streamed, connections=options.connections, seconds=options.seconds))
                mine.streamed.append(_checked(result).requests * options.stream_tokens / result.seconds)
                mine.events.append(result.events / result.seconds)
                rate = options.rate or mine.whole[-1] / 2
                result = _run(open_loop(port, whole, connections=256, rate=rate, seconds=options.seconds))
                mine.median_latency.append(_checked(result).percentile(0.5))
                mine.p99_latency.append(result.percentile(0.99))
    return rates


@contextmanager
def running(side: str) -> Iterator[int]:
    """A server in a process of its own; yields its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "research_engine.bench.server_target", side], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("serving "):
            raise RuntimeError(f"the {side} did not start")
        yield int(line.rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


def _run(load: Coroutine[Any, Any, LoadResult]) -> LoadResult:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(load)
    return uvloop.run(load)


def _checked(result: LoadResult) -> LoadResult:
    if result.failed or not result.requests:
        raise RuntimeError(f"{result.failed} requests failed, {result.requests} were answered")
    return result


def report(options: ServerBenchOptions, rates: dict[str, Rates], console: Console) -> None:
    """Print the table: medians, the range over repeats, ratios."""
    title = f"server around a stub engine, {options.connections} connections, {cpu_name()}, {usable_cores()} cores"
    table = Table(title=title, title_justify="left")
    for name in ("", *SIDES, "ratio"):
        table.add_column(name, justify="left" if not name else "right")
    load = f"{options.rate:g} requests/s" if options.rate else "half the rate"
    rows = (
        (f"requests/s, {options.tokens} tokens each", "whole", 1.0, ",.0f"),
        (f"streamed tokens/s, {options.stream_tokens} tokens each", "streamed", 1.0, ",.0f"),
        ("events/s in those streams", "events", 1.0, ",.0f"),
        (f"median latency at {load}, ms", "median_latency", 1e3, ",.2f"),
        (f"P99 latency at {load}, ms", "p99_latency", 1e3, ",.2f"),
    )
    for label, name, scale, form in rows:
        values = [[scale * value for value in getattr(rates[side], name)] for side in SIDES]
        medians = [statistics.median(side) for side in values]
        shown = [f"{m:{form}} ({min(v):{form}} to {max(v):{form}})" for m, v in zip(medians, values, strict=True)]
        table.add_row(label, *shown, f"{medians[0] / medians[1]:.2f}")
    console.print(table)
