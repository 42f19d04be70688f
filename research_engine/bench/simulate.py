"""How fast the simulator is: requests of ShareGPT's lengths on one simulated GPU, timed on one core."""

from __future__ import annotations

import csv
import random
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tyro

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.loading.dummy import DUMMY_MODELS
from research_engine.simulation.build import cost_model_of, kv_blocks_of, simulated_engine
from research_engine.simulation.gpu_sheet import load_sheet
from research_engine.simulation.profiled import ProfiledCost
from research_engine.simulation.streamed_records import StreamedRecords


@dataclass(frozen=True)
class SimulateOptions:
    """What to simulate.

    Args:
        requests: how many.
        rate: arrivals a second, Poisson; 0 lets all arrive at once.
        lengths: CSV file with prompt_tokens and output_tokens, taken in order with the usual filter of ShareGPT
            benchmarks (both >= 4, prompt <= 1024, sum <= 2048) and over again; without it lengths are drawn from
            log-normals of the filtered file's median and mean (prompt 108 and 236, output 140 and 217).
        model: a dummy model, for its shape.
        gpu: a sheet.
        cost_model: roofline (of the sheet), or profiled:FILE.
        scheduler: a policy by name.
        max_num_seqs: requests at once.
        prefix_caching: whether full blocks are hashed and published.
        seed: of arrivals and lengths.
        parts: also say where a step's time goes; the stopwatches themselves cost some 10 %.
    """

    requests: int = 10_000
    rate: float = 0.0
    lengths: Path | None = None
    model: str = "dummy:llama3-8b"
    gpu: str = "h200"
    cost_model: str = "roofline"
    scheduler: str = "chunked_prefill"
    max_num_seqs: int = 256
    prefix_caching: bool = False
    seed: int = 0
    parts: bool = False


@dataclass(frozen=True)
class SimulateReport:
    """What came out.

    Attributes:
        wall_seconds: from the first arrival to the last token.
        cpu_seconds: of this process in that time; the same on an idle core, less on a shared one.
        simulated_seconds: on the virtual clock.
        prompt_tokens, output_tokens, steps: served.
        mean_batch: rows a step.
        peak_mib: resident memory of the process at most.
        parts: share of the CPU time by part of a step, without overlaps; empty unless asked for.
    """

    wall_seconds: float
    cpu_seconds: float
    simulated_seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    mean_batch: float
    peak_mib: float
    parts: dict[str, float] = field(default_factory=dict)


def run(options: SimulateOptions) -> SimulateReport:
    """Simulate, and time it from the first arrival to the last token.

    Raises:
        ValueError: the cost model cannot be had.
    """
    model, gpu = DUMMY_MODELS[options.model].config, load_sheet(options.gpu)
    cost = cost_model_of(options.cost_model, model_name=options.model, model=model, gpu=gpu)
    config = EngineConfig(
        num_blocks=kv_blocks_of(model, gpu, max_num_seqs=options.max_num_seqs),
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=options.prefix_caching,
        overlap=isinstance(cost, ProfiledCost) and cost.profile.overlap,
    )
    records = StreamedRecords()
    engine = simulated_engine(config, schedulers.create(options.scheduler), cost, records=records)
    arrivals = list(_arrivals(options))
    watches = _watch(engine) if options.parts else {}
    begin, begin_cpu = time.perf_counter(), time.process_time()
    report = replay(engine, arrivals)
    cpu_seconds = time.process_time() - begin_cpu
    return SimulateReport(
        wall_seconds=time.perf_counter() - begin,
        cpu_seconds=cpu_seconds,
        simulated_seconds=report.end - report.start,
        prompt_tokens=sum(record.prompt_tokens for record in records.requests),
        output_tokens=sum(record.output_tokens for record in records.requests),
        steps=records.num_steps,
        mean_batch=records.num_rows / records.num_steps,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        parts=_shares(watches, cpu_seconds),
    )


class _Stopwatch:
    """Stands in for a method and adds up the process's CPU time in it."""

    def __init__(self, owner: Any, name: str) -> None:
        self._method, self.seconds = getattr(owner, name), 0.0
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        begin = time.process_time()
        try:
            return self._method(*arguments)
        finally:
            self.seconds += time.process_time() - begin


def _watch(engine: Engine) -> dict[str, _Stopwatch]:
    """Mutates the engine: its step's parts, and what is inside two of them, run under stopwatches."""
    watches = {name: _Stopwatch(engine, name) for name in ("view", "plan", "commit", "execute", "update")}
    watches["cost model"] = _Stopwatch(engine.executor, "_step_time")
    watches["totals"] = _Stopwatch(engine.records, "add_step")
    return watches


def _shares(watches: Mapping[str, _Stopwatch], total: float) -> dict[str, float]:
    if not watches:
        return {}
    seconds = {name: watch.seconds for name, watch in watches.items()}
    own = {
        "schedule": seconds["view"] + seconds["plan"],
        "commit": seconds["commit"],
        "cost model": seconds["cost model"],
        "executor beside it": seconds["execute"] - seconds["cost model"],
        "update": seconds["update"] - seconds["totals"],
        "totals of the records": seconds["totals"],
    }
    return {**{name: own[name] / total for name in own}, "arrivals and the rest": 1 - sum(own.values()) / total}


def _arrivals(options: SimulateOptions) -> Iterator[Arrival]:
    rng, now, first_token = random.Random(options.seed), 0.0, 0
    for index, (prompt, output) in enumerate(islice(_lengths(options, rng), options.requests)):
        if options.rate:
            now += rng.expovariate(options.rate)
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        yield Arrival(now, str(index), range(first_token, first_token + prompt), sampling)  # no two prompts begin alike
        first_token += prompt


def _lengths(options: SimulateOptions, rng: random.Random) -> Iterator[tuple[int, int]]:
    if options.lengths is None:
        while True:
            prompt, output = int(rng.lognormvariate(4.68, 1.25)), int(rng.lognormvariate(4.94, 0.94))
            if _usual(prompt, output):
                yield prompt, output
    with options.lengths.open(newline="", encoding="utf-8") as file:
        rows = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    yield from cycle([row for row in rows if _usual(*row)])


def _usual(prompt: int, output: int) -> bool:
    return prompt >= 4 and output >= 4 and prompt <= 1024 and prompt + output <= 2048


def main(options: SimulateOptions) -> None:
    """Print the report."""
    done = run(options)
    per_token = done.cpu_seconds / done.output_tokens * 1e6
    print(f"{options.requests} requests, {done.prompt_tokens} prompt and {done.output_tokens} output tokens")
    print(
        f"{done.steps} steps of {done.mean_batch:.0f} rows, {done.simulated_seconds:.1f} simulated seconds: "
        f"{done.output_tokens / done.simulated_seconds:.0f} output tokens/s"
    )
    print(
        f"{done.wall_seconds:.1f} s on the clock, {done.cpu_seconds:.1f} s of CPU time, "
        f"{per_token:.1f} us an output token, peak memory {done.peak_mib:.0f} MiB"
    )
    for name, share in done.parts.items():
        print(f"{name:<22} {share:6.1%}")


if __name__ == "__main__":
    main(tyro.cli(SimulateOptions))
