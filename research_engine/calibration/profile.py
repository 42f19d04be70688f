"""`research-engine profile MODEL`: measures this machine for the simulator (docs/simulation.md)."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from research_engine.bench.result_file import check_place
from research_engine.calibration.designs import PARTS, Design, Limits, basis_of, make_designs
from research_engine.calibration.device_timer import timer_of
from research_engine.calibration.machine import machine_facts, waits_for
from research_engine.calibration.measure import REPEATS, Bench, median_sample
from research_engine.calibration.measurement import Measurement
from research_engine.calibration.recorded import read_steps
from research_engine.calibration.serving import Served, serve, with_launched
from research_engine.engine.engine import Engine
from research_engine.other_load import CoreWatch, gpu_load
from research_engine.simulation.fit import (
    MIN_STEPS,
    Sample,
    device_error,
    every_fifth,
    fit_host,
    fit_profile,
    fit_samples,
    fit_together,
    recorded_samples,
    refine,
    run_error,
)
from research_engine.simulation.power_fit import fit_power, rested_alone, rested_samples
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import Ladders
from research_engine.simulation.timeline import step_error, step_times

DESIGNED_SHARE, SERVED_SHARE = 0.7, 0.25  # of the time; the rest is for loading and fitting
MIN_DESIGNS = 40
CPU_CACHE_GIB = 1.0
HOST_BLOCKS = 64
Advance = Callable[[float, str], None]


class Watch(Protocol):
    """Tells what share of the cores other processes took since it was made; None where that is not known."""

    def others(self) -> float | None: ...


@dataclass(frozen=True)
class ProfileOptions:
    """What to measure, on what.

    Args:
        model: as `research-engine` takes it everywhere.
        out: the profile's file; profile-MODEL-GPU.json in the current directory when None.
        minutes: at most, loading included; what is not measured by then is left out.
        device: auto, cpu, cuda or cuda:N.
        dtype: auto, float32, bfloat16 or float16.
        load_format: dummy fills a model's shape with random weights, which take as long.
        max_num_seqs: rows of a step at most.
        max_num_batched_tokens: tokens of a step at most; the engine's default when None.
        max_model_len: tokens of a request at most; the model's when None.
        block_size: token slots per KV block.
        kv_cache_memory: GiB; None takes what the engine takes on a GPU, and 1 on a CPU.
        scheduler: the policy whose host time is in the profile.
        measurement: file to keep what was measured in, so that `from_measurement` can fit it again; None keeps nothing.
        from_measurement: no measuring: fit what such a file holds.
        from_run: no measuring: fit the steps recorded in this run directory (of experiments/run.py) instead.
        base: with from_run: the profile to refine on those steps; without one they are all there is.
        seed: of the order of the batches, lengths and token ids.
    """

    model: tyro.conf.Positional[str]
    out: Path | None = None
    minutes: float = 10.0
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory: float | None = None
    scheduler: str = "chunked_prefill"
    measurement: Path | None = None
    from_measurement: Path | None = None
    from_run: Path | None = None
    base: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= 60:
            raise ValueError(f"minutes = {self.minutes!r}: must be > 0 and <= 60")
        if self.base is not None and self.from_run is None:
            raise ValueError(f"base = {self.base}: is refined on the steps of a run; give from_run, too")
        given = [name for name in ("measurement", "from_measurement", "from_run") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given: one of them at most")


def main(options: Annotated[ProfileOptions, tyro.conf.arg(name="")]) -> int:
    """Measure designed batches, block moves and ordinary serving on this machine; write a profile with its error.

    Args:
        options: what to measure, on what.
    """
    console = Console()
    for path, option in ((options.out, "out"), (options.measurement, "measurement")):
        if path is not None:
            check_place(path, option)
    found = None
    if options.from_run is not None:
        profile = from_run(options)
    elif options.from_measurement is not None:
        profile = fit(read_measurement(options))
    else:
        with _bar() as advance:
            found = measure(options, advance)
        profile = fit(found)
    out = options.out or Path(_file_name(profile))
    try:
        profile.save(out)
    except OSError as error:
        raise ValueError(f"out = {out}: it cannot be written ({error.strerror})") from error
    console.print(error_table(profile))
    if profile.disturbance:
        remedy = "measure again when the machine is quiet, or treat the times as those of a busy one"
        print(f"WARNING: a busy machine: {profile.disturbance}; {remedy}")
    print(f"wrote {out}; simulate it with cost_model=profiled:{out}")
    if options.measurement is not None and found is not None:
        try:
            found.save(options.measurement)
        except OSError as error:
            rule = f"it cannot be written ({error.strerror})"
            raise ValueError(f"measurement = {options.measurement}: {rule}") from error
    return 0


def from_run(options: ProfileOptions) -> Profile:
    """A profile from the recorded steps of a run directory, alone or on top of a measured one.

    Raises:
        ValueError: no steps there, too few, or a base of another model.
    """
    assert options.from_run is not None
    steps = read_steps(options.from_run)
    if options.base is None:
        return fit_profile(steps, model=options.model, machine={"gpu": f"the machine of {options.from_run.name}"})
    try:
        base = Profile.load(options.base)
    except OSError as error:
        raise ValueError(f"base = {options.base}: {error.strerror}") from error
    base.require(model=options.model)
    training, held = every_fifth(recorded_samples(steps))
    refined = refine(base, training)
    return replace(refined, held_out=run_error(refined, [sample.timed for sample in held], overlap=False))


def read_measurement(options: ProfileOptions) -> Measurement:
    """Raises ValueError: there is none, or it is of another model."""
    assert options.from_measurement is not None
    try:
        found = Measurement.load(options.from_measurement)
    except OSError as error:
        raise ValueError(f"from_measurement = {options.from_measurement}: {error.strerror}") from error
    if found.model != options.model:
        raise ValueError(f"from_measurement = {options.from_measurement}: is of {found.model}, wanted {options.model}")
    return found


def measure(
    options: ProfileOptions,
    advance: Advance,
    *,
    clock: Callable[[], float] = time.perf_counter,
    watch: Callable[[], Watch] = CoreWatch,
    gpu_load: Callable[[int], float | None] = gpu_load,
) -> Measurement:
    """Measure designed batches, block moves and ordinary serving.

    Args:
        advance: is told the share of the time that is used, and what is going on.
        clock: seconds, which the time that it may take is counted by.
        watch: made when measuring begins, tells at its end what share of the cores others took.
        gpu_load: of the GPU with that index, asked before it is used.

    Raises:
        LoadError, OptionError, ValueError: model, device or an option cannot be had, or the time is too short.
    """
    import schedulers
    from research_engine.llm import build_engine, load
    from research_engine.options import EngineOptions, choose_device

    begin, span = clock(), options.minutes * 60
    scheduler = schedulers.create(options.scheduler)  # a wrong name is told before anything is loaded
    device = choose_device(options.device)
    conditions = {"gpu": gpu_load(device.index or 0)} if device.type == "cuda" else {}
    memory = options.kv_cache_memory or (CPU_CACHE_GIB if device.type == "cpu" else None)
    engine_options = EngineOptions(
        options.model,
        device=str(device),
        dtype=options.dtype,
        load_format=options.load_format,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_memory=memory,
        num_host_blocks=HOST_BLOCKS,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=options.seed,
    )
    advance(0.0, f"loading {options.model}")
    loaded = load(engine_options, progress=False)
    engine = build_engine(engine_options, loaded)
    timer = timer_of(str(device))
    executor: Any = engine.executor
    ladders = Ladders(*executor.graph_sizes)
    bench = Bench(engine, timer, waits_for(str(device)), always_warm=timer.apart, seed=options.seed)

    def elapsed() -> float:
        return (clock() - begin) / span

    try:
        watched = watch()
        designs = make_designs(_limits(engine), ladders, steps=REPEATS + 4, seed=options.seed)
        measured = _measure_designs(bench, designs, elapsed, advance)
        moves = bench.moves()
        served = _serve(
            serve(engine.config, engine.executor, scheduler, apart=timer.apart, ladders=ladders, seed=options.seed),
            elapsed, advance,
        )  # fmt: skip
        conditions["cores"] = watched.others()
    finally:
        engine.executor.shutdown()
    if len(measured) < MIN_DESIGNS or len(served) < MIN_STEPS:
        raise ValueError(
            f"in {options.minutes:g} minutes {len(measured)} designed batches and {len(served)} steps of serving were "
            f"measured; a profile needs {MIN_DESIGNS} and {MIN_STEPS}: give more minutes, or lower "
            "max_num_batched_tokens or max_model_len"
        )
    machine = machine_facts(str(device), str(loaded.model.dtype).removeprefix("torch."))
    known = {name: share for name, share in conditions.items() if share is not None}
    return Measurement(
        options.model, machine, ladders, engine.config.overlap, len(designs), measured, moves, served, known
    )


def fit(found: Measurement) -> Profile:
    """From measurements to a profile with its errors: a fifth of each part's designs and of the stretches held out."""
    training, held = [], {}
    for part in PARTS:
        rest, out = every_fifth([design for design in found.designed if design.part == part])
        training += rest
        held[part] = [median_sample(found.designed[design]) for design in out]
    samples = [median_sample(found.designed[design]) for design in training]
    basis = basis_of(training, found.ladders)

    def fit_designed(samples: Sequence[Sample]) -> Profile:
        return fit_samples([*samples, *found.moves], basis, model=found.model, machine=found.machine)

    designed = fit_designed(samples)
    parts = {part: device_error(designed, out) for part, out in held.items() if out}
    held_out = _held_out(found.served)
    seen = [step.sample for step in found.served if step.stretch not in held_out]
    origin = f"{len(found.designed)} of {found.designs_made} designed batches, {len(found.moves)} block moves"
    host = fit_host(seen, found.ladders, samples)
    profile = replace(designed, host=host, overlap=found.overlap, origin=origin)
    parts["served steps, from the designed ones alone"] = _served_error(profile, found, held_out)
    if found.overlap:  # the device works by itself
        counted = [step.stretch not in held_out for step in found.served]
        timed = [step.timed for step in found.served]
        served = [step.sample for step in found.served]
        for _ in range(2):  # a long batch slows down within itself, so what the first limit says changes the prices
            profile = replace(profile, power=fit_power(timed, served, counted, ProfiledCost(profile)))
            alone = rested_alone(samples, ProfiledCost(profile))
            profile = replace(fit_designed(alone), host=host, overlap=True, origin=origin, power=profile.power)
        samples = alone
        served = [step.sample for step in with_launched(found.served, profile)]
        served = rested_samples(timed, served, ProfiledCost(profile))
        seen = [sample for sample, own in zip(served, counted, strict=True) if own]
    refined = fit_together(profile, refine(profile, seen, samples), basis, [*samples, *found.moves], seen)
    conditions = {**found.conditions, **_spread(list(found.designed.values()))}
    return replace(refined, parts=parts, held_out=_served_error(refined, found, held_out), conditions=conditions)


def _spread(repeats: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Between the quartiles of a batch's repeats, as a share of their median; the median of all batches with three."""
    shares = []
    for samples in repeats:
        times = [sample.device for sample in samples if not math.isnan(sample.device)]
        if len(times) >= 3:
            low, middle, high = np.percentile(times, (25, 50, 75))
            shares.append((high - low) / middle)
    return {"spread": float(np.median(shares))} if shares else {}


def _held_out(served: Sequence[Served]) -> set[int]:
    """Every fifth stretch, one at least: the steps of one are too alike to be split."""
    stretches = list(dict.fromkeys(step.stretch for step in served))
    return set(every_fifth(stretches)[1] or stretches[-1:])


def _served_error(profile: Profile, found: Measurement, stretches: set[int]) -> dict[str, float]:
    """Of the steps of some stretches."""
    real, foretold = step_times([step.timed for step in found.served], ProfiledCost(profile), overlap=found.overlap)
    chosen = np.array([step.stretch in stretches for step in found.served])
    return step_error(real[chosen], foretold[chosen])


def error_table(profile: Profile) -> Table:
    """The errors on what was held out, part by part."""
    title = f"{profile.model} on {profile.machine.get('gpu', '?')}: error on what was held out"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for name in ("held out", "mean absolute", "mean signed"):
        table.add_column(name, justify="right")
    for name, error in {**profile.parts, "served steps": profile.held_out}.items():
        table.add_row(name, f"{error['steps']:.0f}", f"{error['mape']:.1%}", f"{error['bias']:+.1%}")
    return table


def _limits(engine: Engine) -> Limits:
    config = engine.config
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.num_blocks,
                  config.block_size)  # fmt: skip


def _measure_designs(
    bench: Bench, designs: Sequence[Design], elapsed: Callable[[], float], advance: Advance
) -> dict[Design, list[Sample]]:
    """Passes over the designs until their share of the time is used up; the first pass may not end either."""
    measured: dict[Design, list[Sample]] = {}
    bench.designed(designs[0])  # whatever is slow the first time
    for number in range(1, 4):
        for design in designs:
            if elapsed() > DESIGNED_SHARE:
                return measured
            advance(elapsed(), f"designed batches, pass {number} of 3")
            measured.setdefault(design, []).extend(bench.designed(design))
    return measured


def _serve(source: Iterator[Served], elapsed: Callable[[], float], advance: Advance) -> list[Served]:
    """Steps of ordinary serving, for its share of the time."""
    end = min(elapsed(), DESIGNED_SHARE) + SERVED_SHARE
    steps = []
    for step in source:
        advance(elapsed(), "ordinary serving")
        steps.append(step)
        if elapsed() > end:
            break
    return steps


@contextmanager
def _bar() -> Iterator[Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left at most"),
               TimeRemainingColumn())  # fmt: skip
    console = Console(file=sys.stderr)
    # refreshed seldom, since it disturbs timings
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda share, text: bar.update(task, completed=min(share, 1.0), description=text)


def _file_name(profile: Profile) -> str:
    words = f"{Path(profile.model).name}-{profile.machine.get('gpu', '')}"
    return f"profile-{re.sub(r'[^A-Za-z0-9.]+', '-', words).strip('-').lower()}.json"
