"""`research-engine capacity MODEL`: the highest rate within limits on latency, and the GPUs that a traffic needs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import tyro
import yaml
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from experiments.capacity.search import Capacity, Copies, find_capacity, find_copies
from experiments.capacity.system import Layout, Load, RunLimits, System
from experiments.config import TrialSettings
from research_engine import metrics
from research_engine.yaml_text import read_yaml

OF_REQUESTS = ("ttft", "tpot", "e2e")
"""Limits that a share of the requests has to keep."""
OF_RUNS = ("itl_p99", "queueing_p50")
"""Limits on a run as a whole."""


@dataclass(frozen=True)
class CapacityOptions:
    """What to serve, on what, within which limits.

    Args:
        model: as `research-engine` takes it everywhere; its config.json alone is read.
        gpu: a GPU sheet: a100, a100-40gb, h100, h200, l40s, rtx4090, or the path of a .json one.
        cost_model: roofline (of the sheet), or profiled:FILE.
        force_profile: take a profile of another model, GPU or version all the same.
        tensor_parallel_size: GPUs that each engine's model is divided over (roofline).
        scheduler: a policy by name, or path/to/file.py:ClassName.
        max_num_seqs: requests at once on each engine.
        max_num_batched_tokens: tokens of a step; None is 8192.
        replicas: engines that serve whole requests, or, with prefill, that decode.
        prefill: engines that prefill alone and send their KV on; 0 for none.
        router: round_robin, least_tokens, prefix_affinity, or path/to/file.py:ClassName.
        link_gbytes: GB a second of KV out of one prefill engine; the sheet's link between GPUs when None.
        link_ms: milliseconds a transfer takes on top.
        ttft: limit in seconds.
        tpot: limit in seconds.
        e2e: limit in seconds.
        attainment: share of the requests that must keep every limit.
        itl_p99: limit in seconds on the 99th percentile of all gaps between tokens of a run.
        queueing_p50: limit in seconds on the median queueing delay of a run.
        lengths: as in an experiment's workload.lengths.
        requests: of each run; a longer run sees slower growth of the queue.
        seeds: runs of the search with other arrivals and lengths, for the interval.
        tolerance: relative width at which the bisection ends.
        traffic: requests per second to find the number of GPUs for.
        out: also write everything to this JSON file.
    """

    model: tyro.conf.Positional[str]
    gpu: str | None = "h200"
    cost_model: str = "roofline"
    force_profile: bool = False
    tensor_parallel_size: int = 1
    scheduler: str = "chunked_prefill"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    replicas: int = 1
    prefill: int = 0
    router: str = "least_tokens"
    link_gbytes: float | None = None
    link_ms: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    attainment: float = 0.9
    itl_p99: float | None = None
    queueing_p50: float | None = None
    lengths: str = "{source: lognormal}"
    requests: int = 1000
    seeds: int = 3
    tolerance: float = 0.02
    traffic: float | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in (*OF_REQUESTS, *OF_RUNS)):
            raise ValueError(f"no limit is given: set {', '.join(OF_REQUESTS)}, {' or '.join(OF_RUNS)}, in seconds")
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment = {self.attainment!r}: must be a share > 0 and <= 1")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance = {self.tolerance!r}: must be > 0 and < 1")
        for name in ("requests", "seeds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= 1")
        if self.link_gbytes is not None and not 0 < self.link_gbytes < math.inf:
            raise ValueError(f"link_gbytes = {self.link_gbytes!r}: must be GB per second > 0")
        if not 0 <= self.link_ms < math.inf:
            raise ValueError(f"link_ms = {self.link_ms!r}: must be milliseconds >= 0")
        if not self.prefill and (self.link_gbytes is not None or self.link_ms):
            raise ValueError("link_gbytes and link_ms: used with prefill alone; nothing is sent without it")
        if self.traffic is not None and not 0 < self.traffic < math.inf:
            raise ValueError(f"traffic = {self.traffic!r}: must be requests per second > 0")


def main(options: Annotated[CapacityOptions, tyro.conf.arg(name="")]) -> int:
    """Find the highest rate that a simulated system serves within limits on latency, with its confidence.

    Args:
        options: what to serve, on what, within which limits.
    """
    console = Console()
    system = make_system(options)
    seeds = range(options.seeds)
    with Console(stderr=True).status("") as status:
        found = find_capacity(
            system.load,
            system.most,
            seeds,
            attainment=options.attainment,
            tolerance=options.tolerance,
            progress=lambda seed, rate: status.update(f"seed {seed}: {rate:.2f} requests/s"),
        )
        copies = None
        if options.traffic is not None and found.interval.mean > 0:
            traffic = options.traffic
            copies = find_copies(
                lambda count, seed: system.load(traffic, seed, copies=count),
                math.ceil(traffic / found.interval.mean),
                seeds,
                attainment=options.attainment,
                progress=lambda seed, count: status.update(f"seed {seed}: {count} x at {traffic:g} requests/s"),
            )
    console.print(runs_table(options, system, found))
    for line in sentences(options, found, copies):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if options.out is not None:
        _write(options, system, found, copies)
    return 0 if found.interval.mean > 0 else 1


def make_system(options: CapacityOptions) -> System:
    """Raises ValueError for whatever of the options cannot be had."""
    from research_engine.simulation.gpu_sheet import load_sheet

    try:
        _, lengths = read_yaml(options.lengths)
    except yaml.YAMLError as error:
        raise ValueError(f"lengths = {options.lengths!r}: {error}") from error
    own = ("model", "gpu", "cost_model", "force_profile", "tensor_parallel_size", "scheduler", "max_num_seqs",
           "max_num_batched_tokens")  # fmt: skip
    try:
        settings = TrialSettings.model_validate(
            {name: getattr(options, name) for name in own}
            | {
                "executor": "simulated",
                "enable_prefix_caching": options.router == "prefix_affinity",
                "workload": {"num_requests": options.requests, "lengths": lengths},
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    bandwidth = None if options.link_gbytes is None else options.link_gbytes * 1e9
    if options.prefill and bandwidth is None and options.gpu is not None:
        bandwidth = load_sheet(options.gpu).gpu_link_bandwidth
    layout = Layout(options.replicas, options.prefill, options.router, bandwidth, options.link_ms * 1e-3)
    slo = metrics.SLO(ttft=options.ttft, tpot=options.tpot, e2e=options.e2e)
    return System(settings, slo, layout, RunLimits(itl_p99=options.itl_p99, queueing_p50=options.queueing_p50))


def runs_table(options: CapacityOptions, system: System, found: Capacity) -> Table:
    """Every run of the first seed, by rate."""
    layout = system.layout
    engines = f"{layout.replicas} x" if not layout.prefill else f"{layout.prefill} prefill + {layout.replicas} decode x"
    title = f"{options.model}, {engines} {system.machine}, seed 0"
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
    for name in ("sent\nreq/s", "within\nlimits", "TTFT\nP50 s", "TTFT\nP99 s", "TPOT\nP50 ms", "TPOT\nP99 ms",
                 "output\ntok/s", "busy"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for load in sorted(cast("list[Load]", found.runs[0]), key=lambda load: load.rate):
        ttft, tpot = load.latencies["ttft"], load.latencies["tpot"]
        table.add_row(
            f"{load.rate:.2f}", f"{load.attainment:.1%}", f"{ttft['p50']:.3f}", f"{ttft['p99']:.3f}",
            f"{tpot['p50'] * 1e3:.1f}", f"{tpot['p99'] * 1e3:.1f}", f"{load.output_throughput:.0f}", f"{load.busy:.0%}",
            verdict(load, options.attainment),
        )  # fmt: skip
    return table


def verdict(load: Load, attainment: float) -> str:
    """In a few words; beyond capacity with the requests that the queue grows by in a second."""
    if load.trend.grows:
        return f"unstable: queue +{load.trend.growth:.2f}/s"
    return "ok" if load.meets(attainment) else "misses the limits"


def sentences(options: CapacityOptions, found: Capacity, copies: Copies | None) -> list[str]:
    """What was found, in words."""
    of_requests, of_runs = (
        ", ".join(f"{name.upper().replace('_', ' ')} <= {getattr(options, name):g} s"
                  for name in names if getattr(options, name) is not None)
        for names in (OF_REQUESTS, OF_RUNS)
    )  # fmt: skip
    each = f"{options.attainment:.0%} of the requests with {of_requests}" if of_requests else ""
    wanted = " and ".join(part for part in (each, of_runs) if part)
    if found.interval.mean == 0:
        return [f"no rate meets the limits ({wanted}): a request alone misses them"]
    mean, low, high = found.interval
    spread = (
        "one seed: no interval"
        if math.isnan(low)
        else f"95 % interval over {options.seeds} seeds {low:.2f} to {high:.2f}"
    )
    lines = [f"capacity: {mean:.2f} requests/s ({spread}), for {wanted}"]
    if copies is not None:
        per_copy = (options.replicas + options.prefill) * options.tensor_parallel_size
        counts = sorted(set(copies.needed.values()))
        over = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        lines.append(
            f"{options.traffic:g} requests/s need {copies.safe * per_copy} GPUs: {copies.safe} x {per_copy} "
            f"({over} over {options.seeds} seeds)"
        )
    return lines


def _write(options: CapacityOptions, system: System, found: Capacity, copies: Copies | None) -> None:
    from experiments.storage import write_json

    assert options.out is not None
    data: dict[str, Any] = {
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "machine": system.machine,
        "capacity": found.interval._asdict() | {"by_seed": found.rates},
        "runs": {seed: [asdict(cast("Load", run)) for run in runs] for seed, runs in found.runs.items()},
        "copies": None if copies is None else {"needed": copies.needed, "safe": copies.safe},
    }
    try:
        write_json(options.out, data)
    except OSError as error:
        raise ValueError(f"out = {options.out}: it cannot be written ({error.strerror})") from error
