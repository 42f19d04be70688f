"""`research-engine validate MODEL`: runs the real engine and the simulator on the same arrivals, and compares them."""

from __future__ import annotations

import datetime
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.validation.comparison import compare
from experiments.validation.recording import RecordedRun, Recording, record_run
from experiments.validation.report import write_validation
from experiments.workloads import WorkloadSettings, build_workload
from research_engine.engine.driver import Arrival, ReplayReport, replay
from research_engine.engine.engine import Engine
from research_engine.other_load import CoreWatch
from research_engine.simulation.profiled import Profile

if TYPE_CHECKING:
    from research_engine.llm import LoadedModel
    from research_engine.options import EngineOptions

Advance = Callable[[int, str], None]


@dataclass(frozen=True)
class ValidateOptions:
    """What to run, and against which profile.

    Args:
        model: as `research-engine` takes it everywhere.
        profile: by `research-engine profile` on this machine.
        force: take a profile of another model, GPU or version all the same.
        out: directory for the recording, the tables and the plots; runs/validate-TIMESTAMP when None.
        loads: shares of the measured capacity, three at least.
        schedulers: policies by name, one of them or more; the least capacity of them counts. Those of the default
            decide otherwise even where nobody has to wait.
        requests: of every run; a P99 has enough under it from 459 on.
        max_prompt: tokens of a prompt at most.
        max_output: tokens of an output at most.
        device: auto, cpu, cuda or cuda:N.
        dtype: auto, float32, bfloat16 or float16.
        load_format: dummy fills a model's shape with random weights.
        max_num_seqs: requests at once.
        max_num_batched_tokens: tokens of a step; the engine's default when None.
        max_model_len: tokens of a request at most; the model's when None.
        num_blocks: KV blocks; None derives them as the engine does.
        kv_cache_memory: GiB for them.
        seed: of arrivals and lengths.
    """

    model: tyro.conf.Positional[str]
    profile: Path
    force: bool = False
    out: Path | None = None
    loads: tuple[float, ...] = (0.5, 0.8, 0.95)
    schedulers: tuple[str, ...] = ("chunked_prefill", "vllm_v0", "sjf")
    requests: int = 500
    max_prompt: int = 1024
    max_output: int = 1024
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    kv_cache_memory: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.loads)) < 3 or min(self.loads) <= 0:
            raise ValueError(f"loads = {list(self.loads)}: must be three different shares > 0, or more")
        if not self.schedulers or len(set(self.schedulers)) < len(self.schedulers):
            raise ValueError(f"schedulers = {list(self.schedulers)}: must be different policies, one at least")
        if self.requests < 8:
            raise ValueError(f"requests = {self.requests}: must be an integer >= 8")


@dataclass
class _Bench:
    """Real engines on one loaded model."""

    options: EngineOptions
    loaded: LoadedModel
    advance: Advance
    engine: Engine | None = field(default=None, init=False)

    def run(self, scheduler: str, arrivals: Sequence[Arrival], text: str) -> tuple[Engine, ReplayReport, float | None]:
        """Serve arrivals on a fresh engine; with the share of the cores that others took."""
        from research_engine.llm import build_engine

        engine = build_engine(replace(self.options, scheduler=scheduler), self.loaded)
        gc.collect()  # what this process has made so far is not looked through while it serves
        gc.freeze()
        watch = CoreWatch()
        try:
            report = replay(
                engine,
                arrivals,
                on_outputs=lambda outputs: self.advance(sum(o.finish_reason is not None for o in outputs), text),
            )
        finally:
            engine.executor.shutdown()
            gc.unfreeze()
        return engine, report, watch.others()


def main(options: Annotated[ValidateOptions, tyro.conf.arg(name="")]) -> int:
    """Serve the same arrivals on the real engine and in simulation; print signed errors by policy, load and percentile.

    Args:
        options: what to run, and against which profile.
    """
    profile = load_profile(options)
    out = options.out or Path("runs") / f"validate-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out = {out}: it cannot be made a directory ({error.strerror})") from error
    runs = (1 + len(options.loads)) * len(options.schedulers)
    with _bar(runs * options.requests + _warm_up(options)) as advance:
        recording = record(options, profile, advance)
    recording.save(out)
    profile.save(out / "profile.json")
    for line in write_validation(recording, profile, compare(recording, profile), out):
        print(line)
    print(f"in {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    return 0


def load_profile(options: ValidateOptions) -> Profile:
    """Raises ValueError: it cannot be read, or is of another model."""
    try:
        profile = Profile.load(options.profile)
    except OSError as error:
        raise ValueError(f"profile = {options.profile}: {error.strerror}") from error
    if not options.force:
        profile.require(model=options.model)
    return profile


def record(options: ValidateOptions, profile: Profile, advance: Advance) -> Recording:
    """Measure every policy's capacity, then run each of them under every load.

    A share of more than a policy's own capacity would be a queue that grows from the first request to the last, and the
    tail of its latencies would say where the run was stopped. So the least capacity of all counts.

    Raises:
        ProfileMismatch: the profile is of another machine or version.
        LoadError, OptionError, ValueError: the model, an option or a policy cannot be had.
    """
    import schedulers
    from research_engine.calibration.machine import machine_facts
    from research_engine.llm import load
    from research_engine.options import EngineOptions

    for name in options.schedulers:
        schedulers.create(name)
    engine_options = EngineOptions(
        options.model,
        device=options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        num_blocks=options.num_blocks,
        kv_cache_memory=options.kv_cache_memory,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    advance(0, f"loading {options.model}")
    loaded = load(engine_options, progress=False)
    machine = machine_facts(str(loaded.model.device), str(loaded.model.dtype).removeprefix("torch."))
    if not options.force:
        profile.require(**machine)
    bench = _Bench(engine_options, loaded, advance)
    at_once = _arrivals(options, loaded.config.vocab_size, None)
    bench.run(options.schedulers[0], at_once[: _warm_up(options)], "warming up")
    capacities: dict[str, float] = {}
    for scheduler in options.schedulers:
        engine, report, _ = bench.run(scheduler, at_once, f"measuring the capacity of {scheduler}")
        capacities[scheduler] = len(at_once) / (report.end - report.start)
    capacity = min(capacities.values())
    runs: list[RecordedRun] = []
    for load_share in sorted(options.loads):
        arrivals = _arrivals(options, loaded.config.vocab_size, load_share * capacity)
        for scheduler in options.schedulers:
            text = f"{scheduler} at {load_share:.0%} of {capacity:.2f} requests/s"
            served, report, others = bench.run(scheduler, arrivals, text)
            runs.append(
                record_run(
                    served.records, report, scheduler=scheduler, load=load_share, rate=load_share * capacity,
                    disturbed=others,
                )
            )  # fmt: skip
    return Recording(options.model, machine, engine.config, capacity, runs, capacities)


def _warm_up(options: ValidateOptions) -> int:
    """Requests that are served first and thrown away."""
    return options.requests // 4


def _arrivals(options: ValidateOptions, vocab_size: int, rate: float | None) -> list[Arrival]:
    """The same lengths and pattern at every rate; all at once for None."""
    process = {"process": "at_once"} if rate is None else {"process": "poisson", "rate": rate}
    settings = WorkloadSettings.model_validate(
        {
            "num_requests": options.requests,
            "arrivals": process,
            "lengths": {"source": "lognormal", "max_prompt": options.max_prompt, "max_output": options.max_output,
                        "max_total": options.max_model_len or options.max_prompt + options.max_output},
        }
    )  # fmt: skip
    return build_workload(settings, options.seed, vocab_size=vocab_size).arrivals


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
               TimeElapsedColumn())  # fmt: skip
    # refreshed seldom, since it disturbs timings
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda finished, text: bar.update(task, advance=finished, description=text)
