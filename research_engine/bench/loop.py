"""Host time of the loop itself: schedule, commit and update, with an executor that does nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams

WARMUP_STEPS = 10


@dataclass(frozen=True)
class LoopBenchOptions:
    """What to measure.

    Args:
        sequences: running at once, all decoding.
        steps: timed, after all prompts are computed.
        prompt_tokens: of the shortest prompt; lengths are spread over one block, so that every step has its share of
            blocks taken and published. No two prompts begin alike.
        block_size: token slots per block.
        schedulers: policies by name, one after the other.
        prefix_caching: whether full blocks are hashed and published.

    Raises:
        ValueError: a number below 1.
    """

    sequences: int = 256
    steps: int = 300
    prompt_tokens: int = 128
    block_size: int = 16
    schedulers: Sequence[str] = ("fcfs", "chunked_prefill", "priority")
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("sequences", "steps", "prompt_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be an integer >= 1")


@dataclass(frozen=True)
class LoopTimes:
    """Microseconds per sequence and step.

    Attributes:
        schedule: view and plan, median over steps.
        commit: rules checked, blocks taken, rows made; median.
        update: tokens appended, blocks published, record left; median.
        total: of the three together, median.
        fastest_tenth: the total that a tenth of the steps stays below: on a busy machine nearer to the loop's own cost.
    """

    schedule: float
    commit: float
    update: float
    total: float
    fastest_tenth: float


class _Stub:
    """Gives every row the same token."""

    def execute(self, batch: Batch) -> StepResult:
        return StepResult([7] * len(batch.rows))

    def shutdown(self) -> None:
        pass


def run(options: LoopBenchOptions, scheduler: str) -> LoopTimes:
    """Measure one policy.

    Raises:
        ValueError: no policy of that name.
    """
    parts: list[list[float]] = [[], [], []]
    engine = _decoding_engine(options, scheduler)
    for step in range(WARMUP_STEPS + options.steps):
        times = _timed_step(engine, options.sequences)
        if step >= WARMUP_STEPS:
            for part, seconds in zip(parts, times, strict=True):
                part.append(seconds * 1e6 / options.sequences)
    totals = sorted(map(sum, zip(*parts, strict=True)))
    schedule, commit, update = map(statistics.median, parts)
    return LoopTimes(schedule, commit, update, statistics.median(totals), totals[len(totals) // 10])


def _decoding_engine(options: LoopBenchOptions, scheduler: str) -> Engine:
    """An engine all of whose sequences have their prompts computed and stay for the whole measurement."""
    longest = options.prompt_tokens + options.block_size
    # the last sequence begins when all other prompts are computed, and the first has decoded until then
    steps = WARMUP_STEPS + options.steps + options.sequences
    config = EngineConfig(
        num_blocks=options.sequences * (-(-(longest + steps) // options.block_size) + 1),
        block_size=options.block_size,
        max_num_seqs=options.sequences,
        max_num_batched_tokens=max(8192, longest, 2 * options.sequences),
        max_model_len=longest + steps + 1,
        enable_prefix_caching=options.prefix_caching,
    )
    engine = Engine(config, schedulers.create(scheduler), _Stub())
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(options.sequences):
        length = options.prompt_tokens + index % options.block_size
        engine.add_request(str(index), range(index, index + length), sampling)
    while engine.view().num_waiting or not all(request.is_decoding for request in engine.view().running):
        engine.step()
    return engine


def _timed_step(engine: Engine, sequences: int) -> tuple[float, float, float]:
    """Seconds of a step's three parts."""
    clock = time.perf_counter
    begin = clock()
    view = engine.view()
    plan = engine.plan(view)
    planned = clock()
    batch = engine.commit(plan, view)
    committed = clock()
    result = engine.execute(batch)
    executed = clock()
    engine.update(batch, result)
    end = clock()
    assert len(batch.rows) == sequences
    return planned - begin, committed - planned, end - executed


def report(options: LoopBenchOptions, console: Console) -> None:
    """Measure the policies, and print a table."""
    title = f"host time at {options.sequences} running sequences, microseconds per sequence and step"
    table = Table(title=title, title_justify="left")
    table.add_column("scheduler")
    for name in ("schedule", "commit", "update", "total", "fastest tenth"):
        table.add_column(name, justify="right")
    for scheduler in options.schedulers:
        times = run(options, scheduler)
        values = (times.schedule, times.commit, times.update, times.total, times.fastest_tenth)
        table.add_row(scheduler, *(f"{value:.2f}" for value in values))
    console.print(table)


if __name__ == "__main__":
    report(LoopBenchOptions(), Console())
