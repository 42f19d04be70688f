"""What scheduling costs: every policy with a long queue, and the whole loop against vLLM's scheduler, in one run.

    full       all seats taken, `waiting` requests in the queue, nobody can be admitted: a step's view and plan
    turnover   in every step one request ends, one arrives and one is admitted; the policy's events are counted, too

There is no model: an executor gives every row the same token. Blocks never run out, so this is the cost of choosing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import schedulers
from research_engine.bench.loop import LoopBenchOptions, run
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, EngineView, Request, SchedulePlan, Scheduler, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.records import Records, RequestRecord, StepRecord
from research_engine.engine.sampling_params import SamplingParams

WARMUP_STEPS = 20
CLIENTS = 16
DRIVER = Path(__file__).with_name("vllm_scheduler.py")


@dataclass(frozen=True)
class SchedulerBenchOptions:
    """What to measure.

    Args:
        schedulers: policies; all that are available when left out.
        running: requests that decode.
        waiting: requests in the queue.
        steps: timed, of each kind.
        prompt_tokens: of every prompt.
        vllm_python: the Python of an environment with vLLM; the whole loop is compared with its scheduler.
        rounds: of that comparison; the two sides take turns, and the median is told.
    """

    schedulers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    running: int = 256
    waiting: int = 10_000
    steps: int = 300
    prompt_tokens: int = 128
    vllm_python: Path | None = None
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("running", "steps", "prompt_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be >= 1")
        if self.waiting < 0:
            raise ValueError(f"waiting = {self.waiting!r}: must be >= 0")
        for name in self.schedulers:
            schedulers.create(name)  # refuses an unknown one with those there are
        if self.vllm_python is not None and not self.vllm_python.is_file():
            raise ValueError(f"vllm_python = {str(self.vllm_python)!r}: no such file")


@dataclass(frozen=True)
class SchedulerCost:
    """Medians, microseconds a step.

    Attributes:
        full: view and plan, all seats taken.
        turnover: view and plan, one request ending and one admitted.
        events: of such a step: on_arrival, on_step, on_finish together.
    """

    full: float
    turnover: float
    events: float


class _Timed(Scheduler):
    """A policy, with the time that its events take."""

    def __init__(self, policy: Scheduler) -> None:
        self._policy = policy
        self.seconds = 0.0

    def schedule(self, view: EngineView) -> SchedulePlan:
        return self._policy.schedule(view)

    def on_arrival(self, request: Request) -> None:
        self._tell(self._policy.on_arrival, request)

    def on_step(self, record: StepRecord) -> None:
        self._tell(self._policy.on_step, record)

    def on_finish(self, request: Request) -> None:
        self._tell(self._policy.on_finish, request)

    def _tell(self, event: Callable[[Any], None], about: object) -> None:
        begin = time.perf_counter()
        event(about)
        self.seconds += time.perf_counter() - begin


class _Stub:
    """Gives every row the same token."""

    def execute(self, batch: Batch) -> StepResult:
        return StepResult([7] * len(batch.rows))

    def shutdown(self) -> None:
        pass


class _NoRecords(Records):
    """Keeps nothing."""

    def add_step(self, record: StepRecord) -> None:
        pass

    def add_request(self, record: RequestRecord) -> None:
        pass


class _Crowd:
    """An engine with a queue, and requests enough to go on."""

    def __init__(self, options: SchedulerBenchOptions, scheduler: str, *, turnover: bool) -> None:
        self.options = options
        self.policy = _Timed(schedulers.create(scheduler))
        self._turnover = turnover
        self._added = 0
        seats = options.running
        self._longest = options.prompt_tokens + 2 * seats + 2 * (options.steps + WARMUP_STEPS + seats)
        config = EngineConfig(
            # so many that reserving policies get the same seats as the others
            num_blocks=(seats + 1) * (-(-self._longest // 16) + 1) * 2,
            max_num_seqs=seats,
            max_num_batched_tokens=seats * (options.prompt_tokens + 1),  # all of them are admitted in one step
            max_model_len=self._longest + 1,
            enable_prefix_caching=False,
        )
        self.engine = Engine(config, self.policy, _Stub(), records=_NoRecords())
        for _ in range(seats + options.waiting):
            self.add()
        for _ in range(3):
            self.engine.step()
        running = self.engine.view().running
        assert len(running) == seats and all(request.is_decoding for request in running), f"{scheduler}: {len(running)}"

    def add(self) -> None:
        """One more request; the first ones end one after the other, all others after as many steps as seats."""
        index, seats = self._added, self.options.running
        self._added += 1
        output = self._longest - self.options.prompt_tokens
        if self._turnover:
            output = 5 + index if index < seats else seats
        self.engine.add_request(
            str(index),
            range(index % 50_000, index % 50_000 + self.options.prompt_tokens),
            SamplingParams(max_tokens=output, ignore_eos=True),
            priority=index % 3,
            client=f"client {index % CLIENTS}",
            deadline=self.engine.clock.now() + 10.0 + index % 7,
            predicted_tokens=1 + index * 37 % 500,
        )

    def step(self) -> tuple[float, float]:
        """Seconds of view and plan, and of the events."""
        engine, clock = self.engine, time.perf_counter
        self.policy.seconds = 0.0
        begin = clock()
        view = engine.view()
        plan = engine.plan(view)
        planned = clock() - begin
        batch = engine.commit(plan, view)
        engine.update(batch, engine.execute(batch))
        while self._turnover and engine.view().num_waiting < self.options.waiting:
            self.add()
        return planned, self.policy.seconds


def measure(options: SchedulerBenchOptions, scheduler: str) -> SchedulerCost:
    """What one policy costs."""
    full = _Crowd(options, scheduler, turnover=False)
    plans = [full.step()[0] for _ in range(WARMUP_STEPS + options.steps)][WARMUP_STEPS:]
    moving = _Crowd(options, scheduler, turnover=True)
    both = [moving.step() for _ in range(WARMUP_STEPS + options.steps)][WARMUP_STEPS:]
    return SchedulerCost(
        full=statistics.median(plans) * 1e6,
        turnover=statistics.median(plan for plan, _ in both) * 1e6,
        events=statistics.median(events for _, events in both) * 1e6,
    )


def vllm_step(options: SchedulerBenchOptions) -> dict[str, Any]:
    """vLLM's figures, from a process of its own Python: version, and schedule, update and total in microseconds a step.

    Raises:
        ValueError: it could not be run; the last lines of what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        # alone in a directory, so that nothing beside it is taken for a package of that environment
        driver = shutil.copy(DRIVER, folder)
        command = [str(options.vllm_python), driver]
        for name in ("running", "prompt_tokens", "steps"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ValueError(f"vllm_python = {str(options.vllm_python)!r}: its scheduler could not be run:\n{said}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return figures


def compare(options: SchedulerBenchOptions, policies: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Microseconds of a whole step, vLLM's first, then with each policy: the median, and what a tenth stays below.

    The sides take turns for `rounds` rounds; of each figure the median over the rounds is told.
    """
    loop = LoopBenchOptions(
        sequences=options.running, steps=options.steps, prompt_tokens=options.prompt_tokens, prefix_caching=False
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        theirs = vllm_step(options)
        name = f"vLLM {theirs['version']}, V1 scheduler"
        found.setdefault(name, []).append((theirs["total"], theirs["fastest_tenth"]))
        for name in policies:
            times = run(loop, name)
            found.setdefault(name, []).append((times.total * options.running, times.fastest_tenth * options.running))
    return {
        name: (statistics.median(total for total, _ in rounds), statistics.median(fast for _, fast in rounds))
        for name, rounds in found.items()
    }


def main(options: Annotated[SchedulerBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Cost of a decision with a long queue for each policy; with --vllm-python, steps a second against vLLM's."""
    console = Console(highlight=False)
    names = options.schedulers or tuple(schedulers.available())
    title = (
        f"{options.running} running, {options.waiting:,} waiting: microseconds a step, median of {options.steps} "
        f"({platform.processor() or platform.machine()}, Python {platform.python_version()})"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("scheduler", overflow="fold")
    for column in ("full", "of fcfs", "turnover", "of fcfs", "events"):
        table.add_column(column, justify="right")
    first = measure(options, "fcfs")
    for name in names:
        cost = first if name == "fcfs" else measure(options, name)
        ratios = cost.full / first.full, cost.turnover / first.turnover
        table.add_row(
            name,
            f"{cost.full:.0f}",
            f"{ratios[0]:.2f}",
            f"{cost.turnover:.0f}",
            f"{ratios[1]:.2f}",
            f"{cost.events:.0f}",
        )
    console.print(table)
    if options.vllm_python is not None:
        policies = options.schedulers or ("fcfs", "chunked_prefill")
        console.print(_against(options, compare(options, policies)))
    return 0


def _against(options: SchedulerBenchOptions, times: dict[str, tuple[float, float]]) -> Table:
    title = f"the whole loop without a model, {options.running} running, median of {options.rounds} rounds in turns"
    table = Table(title=title, title_justify="left")
    for column in ("", "us a step", "steps/s", "of vLLM's", "fastest tenth, us", "of vLLM's"):
        table.add_column(column, justify="left" if not column else "right")
    (median, fast), *_ = times.values()
    for name, (own, own_fast) in times.items():
        table.add_row(
            name, f"{own:.0f}", f"{1e6 / own:.0f}", f"{median / own:.2f}", f"{own_fast:.0f}", f"{fast / own_fast:.2f}"
        )
    return table
