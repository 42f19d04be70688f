"""From the times of real steps to a profile, by robust non-negative least squares, with its error on steps held out.

The device's time is linear in the unknowns of `basis.Basis`, so one solve finds them together; the host's parts are a
few lines each. Residuals are relative to the step's time, so that short steps count as much as long ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from research_engine.engine.records import StepRecord

from .attention_cost import AttentionFormula
from .basis import Basis
from .cost_model import Work, work_of_record
from .curve import Curve
from .host_cost import HostCost
from .least_squares import solve
from .profiled import PARTS, Profile, ProfiledCost
from .step_kind import NO_GRAPHS, Ladders, StepKind
from .timeline import TimedStep, step_error, step_times

T = TypeVar("T")
HOLD_OUT_EVERY = 5
MIN_STEPS = 40
STEPS_PER_KNOT = 5
_MEASURED = 0.25  # of a served step, in the fit of both together
_NEAR_ONE = 0.02  # weight of "a measured part is right as it is" in the last fit, beside 1 of a step


class Sample(NamedTuple):
    """One measured step, in seconds.

    Attributes:
        work: what it asked of the device.
        device: the device's time; NaN where it was not seen by itself.
        schedule: the host's, until the plan was committed.
        handover: the host's, from there until the device had all of it.
        after: the host's, from the tokens on until the next step began.
    """

    work: Work
    device: float
    schedule: float = 0.0
    handover: float = 0.0
    after: float = 0.0

    @classmethod
    def of(cls, record: StepRecord) -> Sample:
        """A recorded step of an engine that does not run ahead; what the executor does counts as the device's."""
        return cls(
            work_of_record(record),
            device=record.executed - record.committed,
            schedule=record.committed - record.started,
            after=record.finished - record.executed,
        )

    @property
    def timed(self) -> TimedStep:
        """The step alone, from 0 on."""
        executed = self.schedule + self.handover + self.device
        return TimedStep(self.work, 0.0, executed, executed + self.after)


def fit_profile(steps: Sequence[StepRecord], *, model: str, machine: Mapping[str, str]) -> Profile:
    """Fit a profile to the steps of real runs without overlap, every fifth of them held out.

    A step's time is finished - started: scheduling, execution and update.

    Args:
        steps: of one model on one machine, warm; at least 40 with rows.
        model, machine: as `Profile` stores them.

    Raises:
        ValueError: as `recorded_samples`.
    """
    training, held = every_fifth(recorded_samples(steps))
    draws = sorted(sample.work.draws for sample in training)
    basis = Basis(tuple(_knots(sorted(sample.work.tokens for sample in training))), (float(max(1, draws[-1])),))
    profile = replace(
        fit_samples(training, basis, model=model, machine=machine),
        host=fit_host(training, NO_GRAPHS),
        origin=f"fitted to {len(training)} recorded steps",
    )
    return replace(profile, held_out=run_error(profile, [sample.timed for sample in held], overlap=False))


def fit_samples(
    samples: Sequence[Sample],
    basis: Basis,
    *,
    model: str,
    machine: Mapping[str, str],
    counts: Sequence[float] | None = None,
) -> Profile:
    """Fit the device's times, those that were seen; the profile's host time is 0.

    Args:
        counts: how often each sample counts; once when None.
    """
    often = dict(enumerate(counts)) if counts is not None else {}
    weight = [math.sqrt(often.get(at, 1.0)) for at, sample in enumerate(samples) if not math.isnan(sample.device)]
    samples = [sample for sample in samples if not math.isnan(sample.device)]
    times = np.array([sample.device for sample in samples])
    rows = np.array([basis.features(sample.work) for sample in samples])
    pairs = sum(t * (k + (t + 1) / 2) for sample in samples for t, k in sample.work.prefills)
    prefill = sum(sample.device for sample in samples if sample.work.prefills)
    smooth = basis.smoothness(prefill / pairs if pairs else 1.0)
    profile = basis.profile(solve(rows, times, times / np.array(weight), smooth), model, machine)
    launched = any(sample.work.tokens and basis.ladders.kind(sample.work) is StepKind.LAUNCHED for sample in samples)
    if profile.token_graph is not None and not launched:  # a longer step than any graph takes goes on with their table
        return replace(profile, dense=profile.token_graph)
    return profile


def fit_host(samples: Sequence[Sample], ladders: Ladders, handed: Sequence[Sample] = ()) -> HostCost:
    """The host's part, each of its pieces by itself.

    What launching a step takes beyond handing over a graph of as many rows and tokens is done beside the device.

    Args:
        samples: of ordinary serving.
        ladders: of the executor.
        handed: further steps whose handover alone counts.
    """
    schedule = _line([sample.schedule for sample in samples], [[sample.work.sequences] for sample in samples])
    after = _line([sample.after for sample in samples], [[sample.work.draws] for sample in samples])
    by_kind: dict[StepKind, list[Sample]] = {}
    for sample in (*samples, *handed):
        if sample.handover > 0:
            by_kind.setdefault(ladders.kind(sample.work), []).append(sample)
    handover: dict[StepKind, tuple[float, float, float]] = {}
    for kind, own in by_kind.items():
        works = [[sample.work.sequences, sample.work.tokens] for sample in own]
        if kind is StepKind.DECODE_GRAPH:  # as many tokens as rows
            a, b = _line([sample.handover for sample in own], [work[:1] for work in works])
            handover[kind] = (a, b, 0.0)
        else:
            a, b, c = _line([sample.handover for sample in own], works)
            handover[kind] = (a, b, c)
    launch = 0.0
    if StepKind.LAUNCHED in handover:
        graph = handover.get(StepKind.TOKEN_GRAPH) or handover.get(StepKind.DECODE_GRAPH) or (0.0, 0.0, 0.0)
        launch = max(0.0, handover[StepKind.LAUNCHED][0] - graph[0])
    return HostCost((schedule[0], schedule[1]), handover, launch, (after[0], after[1]))


def refine(profile: Profile, samples: Sequence[Sample], handed: Sequence[Sample] = ()) -> Profile:
    """Fit a measured profile once more, to the steps of real runs: how much of each part they take, and host time.

    What designed batches cannot show (contexts as unequal as they come, rows that stay from step to step, the policy's
    own time) goes into a factor for each part, which is pulled towards 1, one for each size of a graph, and into the
    host's pieces.

    Args:
        profile: measured; its attention is a formula.
        samples, handed: as `fit_host` takes them.

    Raises:
        ValueError: attention is a table.
    """
    if not isinstance(profile.attention, AttentionFormula):
        raise ValueError("only a profile whose attention is a formula can be refined; this one has a table")
    seen = [sample for sample in samples if not math.isnan(sample.device)]
    factor = dict.fromkeys(PARTS, 1.0)
    if seen:
        cost = ProfiledCost(profile)
        parts = [cost.parts(sample.work) for sample in seen]
        rows = np.array([[own[name] for name in PARTS] for own in parts])
        times = np.array([sample.device for sample in seen])
        pull = _NEAR_ONE * np.eye(len(PARTS))
        factor = dict(zip(PARTS, map(float, solve(rows, times, times, pull, pull.sum(axis=1))), strict=True))
    own, decode, prefill = profile.attention, factor["decode"], factor["prefill"]
    attention = AttentionFormula(
        own.base * decode, own.per_row * decode, own.per_token * decode, own.per_longest * decode,
        {point: rate * prefill for point, rate in own.prefill.items()}, own.per_longest_prefill * prefill,
    )  # fmt: skip
    scaled = replace(
        profile,
        dense=_scaled(profile.dense, factor["dense"]),
        head=_scaled(profile.head, factor["head"]),
        decode_graph=profile.decode_graph and _scaled(profile.decode_graph, factor["decode graph"]),
        token_graph=profile.token_graph and _scaled(profile.token_graph, factor["token graph"]),
        attention=attention,
        block_move=(factor["moves"] * profile.block_move[0], factor["moves"] * profile.block_move[1]),
        block_copy=(factor["moves"] * profile.block_copy[0], factor["moves"] * profile.block_copy[1]),
        host=fit_host(samples, profile.ladders, handed),
        origin=f"{profile.origin}; refined on {len(samples)} served steps",
    )
    return _follow_sizes(scaled, seen)


def fit_together(
    designed: Profile, refined: Profile, basis: Basis, measured: Sequence[Sample], served: Sequence[Sample]
) -> Profile:
    """Fit measured batches and served steps at once, so that a table follows what was served wherever enough was.

    A device that is short of power is slower in some of its work and not in other, which no factor for a part can say.
    The measured times are first made longer as `refined` says; each counts for less than a served step.

    Args:
        designed: fitted to `measured` alone; refined: the same after `refine` on `served`, whose host time is kept.
        basis: of `designed`.
    """
    alone, loaded = ProfiledCost(designed), ProfiledCost(refined)
    scaled = []
    for sample in measured:
        before, now = (cost.time_of(sample.work).device for cost in (alone, loaded))
        scaled.append(sample._replace(device=sample.device * now / before) if before else sample)
    counts = [_MEASURED] * len(scaled) + [1.0] * len(served)
    own = fit_samples([*scaled, *served], basis, model=refined.model, machine=refined.machine, counts=counts)
    return replace(
        refined, dense=own.dense, head=own.head, attention=own.attention, decode_graph=own.decode_graph,
        token_graph=own.token_graph, block_move=own.block_move, block_copy=own.block_copy,
    )  # fmt: skip


def run_error(profile: Profile, steps: Sequence[TimedStep], *, overlap: bool) -> dict[str, float]:
    """How far a profile is from consecutive steps of a run, given their batches; as `timeline.step_error`."""
    return step_error(*step_times(steps, ProfiledCost(profile), overlap=overlap))


def device_error(profile: Profile, samples: Sequence[Sample]) -> dict[str, float]:
    """How far a profile is from the device's times of measured steps, where seen; as `timeline.step_error`."""
    cost = ProfiledCost(profile)
    samples = [sample for sample in samples if not math.isnan(sample.device)]
    real = np.array([sample.device for sample in samples])
    return step_error(real, np.array([cost.time_of(sample.work).device for sample in samples]))


def recorded_samples(steps: Sequence[StepRecord]) -> list[Sample]:
    """The steps with rows.

    Raises:
        ValueError: fewer than 40, one that took no time, or one that began before the one before it had ended.
    """
    used = [step for step in steps if step.request_ids]
    if len(used) < MIN_STEPS:
        raise ValueError(f"{len(used)} steps with rows: a fit needs at least {MIN_STEPS}")
    for step in used:
        if not step.finished - step.started > 0 or not step.executed - step.committed > 0:
            raise ValueError(f"step {step.step} took {step.finished - step.started} s; real steps take time")
    for before, step in pairwise(used):
        if before.step + 1 == step.step and step.started < before.executed:
            rule = "a fit needs a run without overlap, where a step's time is its own"
            raise ValueError(f"step {step.step} began before step {before.step} was done: {rule}")
    return [Sample.of(step) for step in used]


def every_fifth(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """The rest, and every fifth."""
    rest = [item for at, item in enumerate(items) if at % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
    return rest, list(items[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY])


def _line(seconds: Sequence[float], counts: Sequence[Sequence[float]]) -> list[float]:
    """a, b, ...: a + b count + ... seconds, errors in seconds; zeros without data."""
    if not len(seconds):
        return [0.0] * (1 + len(counts[0]) if counts else 2)
    rows = np.array([[1.0, *own] for own in counts])
    return [float(x) for x in solve(rows, np.array(seconds), np.full(len(seconds), float(np.mean(seconds)) or 1.0))]


def _follow_sizes(profile: Profile, samples: Sequence[Sample]) -> Profile:
    """Each graph's table by how much longer its sizes took in real steps; interpolated where a size was not served."""
    cost = ProfiledCost(profile)
    ratios: dict[StepKind, dict[int, list[float]]] = {StepKind.DECODE_GRAPH: {}, StepKind.TOKEN_GRAPH: {}}
    for sample in samples:
        kind, size = profile.ladders.placed(sample.work)
        if kind in ratios:
            ratios[kind].setdefault(size, []).append(sample.device / cost.time_of(sample.work).device)
    tables = []
    for curve, own in zip((profile.decode_graph, profile.token_graph), ratios.values(), strict=True):
        known = sorted((size, float(np.median(found))) for size, found in own.items() if len(found) >= STEPS_PER_KNOT)
        if curve is not None and known:
            sizes, factors = zip(*known, strict=True)
            curve = Curve((x, y * float(np.interp(x, sizes, factors))) for x, y in curve.points)
        tables.append(curve)
    return replace(profile, decode_graph=tables[0], token_graph=tables[1])


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve((x, y * factor) for x, y in curve.points)


def _knots(tokens: Sequence[int]) -> list[float]:
    """Powers of two where each piece between has steps enough to tell its slope; first and last as in the data."""
    knots, counted = [float(tokens[0])], 0
    power = 1
    while power < tokens[-1]:
        seen = sum(1 for number in tokens if number <= power)
        if power > knots[-1] and seen - counted >= STEPS_PER_KNOT and len(tokens) - seen >= STEPS_PER_KNOT:
            knots.append(float(power))
            counted = seen
        power *= 2
    if tokens[-1] > knots[-1]:
        knots.append(float(tokens[-1]))
    return knots
