"""From the times of real steps to a profile, by robust non-negative least squares, with its error on steps held out.

    execute = base + ramps(tokens) + ramps(draws) + [a + b n + c sum(kv) + d max(kv)] + rate(chunk, kv) pairs + moves
    host    = a + b rows

kv are the contexts of the n rows of one token, pairs the causal query-key pairs of the other rows, whose rate is
interpolated over a grid. Ramps are piecewise linear and never fall. Everything is linear in its unknowns, so one solve
finds them together. Residuals are relative to the step's time, so that short steps count as much as long ones, and
large ones count less (Huber, "Robust Estimation of a Location Parameter", 1964, by reweighting): a busy machine makes
steps long, never short. All coefficients are >= 0 (Lawson and Hanson, "Solving Least Squares Problems", 1974, ch. 23):
a model that gets cheaper with work is wrong off its data, however well it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.optimize import nnls

from research_engine.engine.records import StepRecord

from .attention_cost import AttentionFormula
from .cost_model import Work, work_of_record
from .curve import Curve
from .profiled import Profile, ProfiledCost

T = TypeVar("T")
HOLD_OUT_EVERY = 5
MIN_STEPS = 40
STEPS_PER_KNOT = 5
_ROUNDS = 6  # of reweighting
_HUBER = 2.0  # residuals beyond that many robust standard deviations count less
_SMOOTH = 0.02  # weight of "neighbouring rates are alike", beside 1 of a step
_NEAR_ONE = 0.05  # weight of "a measured part is right as it is" in the last fit


class Sample(NamedTuple):
    """One measured step.

    Attributes:
        work: what it asked of the device.
        execute: seconds of the device, which nothing hides.
        host: seconds of the host beside it, which an engine that runs ahead hides.
    """

    work: Work
    execute: float
    host: float

    @classmethod
    def of(cls, record: StepRecord, handover: float = 0.0) -> Sample:
        """A recorded step; of its execution, `handover` seconds were the host's: preparing inputs and launching."""
        host = record.committed - record.started + record.finished - record.executed
        return cls(work_of_record(record), record.executed - record.committed - handover, host + handover)

    @property
    def total(self) -> float:
        return self.execute + self.host


@dataclass(frozen=True)
class Basis:
    """Where the profile's tables have their points; all ascending.

    Args:
        dense: numbers of tokens.
        head: numbers of rows drawn, above 0.
        chunks, befores: tokens of a chunk, and tokens computed before it.
    """

    dense: tuple[float, ...]
    head: tuple[float, ...] = (1.0,)
    chunks: tuple[float, ...] = (1.0,)
    befores: tuple[float, ...] = (0.0,)

    def features(self, work: Work) -> list[float]:
        """What each unknown is multiplied by, in seconds of execution."""
        dense = [1.0 if work.tokens else 0.0, *_ramps(work.tokens, self.dense)]
        head = _ramps(work.draws, (0.0, *self.head))
        decode = [float(work.decodes > 0), work.decodes, work.decode_kv, work.decode_kv_max]
        rates = np.zeros((len(self.chunks), len(self.befores)))
        for tokens, before in work.prefills:
            pairs = tokens * (before + (tokens + 1) / 2)
            for row, share in _weights(tokens, self.chunks):
                for column, other in _weights(before, self.befores):
                    rates[row, column] += pairs * share * other
        moved, copied = work.blocks_moved, work.blocks_copied
        moves = [float(moved > 0), moved, float(copied > 0), copied]
        return [*dense, *head, *decode, *rates.ravel(), *moves]

    def smoothness(self, typical_rate: float) -> np.ndarray:
        """Rows, one a pair of neighbours in the grid of rates, that ask for equal rates."""
        columns = len(self.dense) + len(self.head) + 4 + len(self.chunks) * len(self.befores) + 4
        first = len(self.dense) + len(self.head) + 4
        grid = first + np.arange(len(self.chunks) * len(self.befores)).reshape(len(self.chunks), len(self.befores))
        rows = []
        for left, right in (*zip(grid[:-1].ravel(), grid[1:].ravel(), strict=True),
                            *zip(grid[:, :-1].ravel(), grid[:, 1:].ravel(), strict=True)):  # fmt: skip
            row = np.zeros(columns)
            row[left], row[right] = _SMOOTH / typical_rate, -_SMOOTH / typical_rate
            rows.append(row)
        return np.array(rows).reshape(len(rows), columns)

    def profile(self, values: Iterable[float], model: str, machine: Mapping[str, str]) -> Profile:
        """The profile whose unknowns are `values`."""
        at = iter(float(value) for value in values)
        base = next(at)
        dense = _heights(base, [next(at) for _ in self.dense[1:]], self.dense)
        head = _heights(0.0, [next(at) for _ in self.head], (0.0, *self.head))
        a, b, c, d = (next(at) for _ in range(4))
        rates: dict[tuple[float, ...], float] = {(t, k): next(at) for t in self.chunks for k in self.befores}
        return Profile(
            model=model,
            machine=machine,
            dense=Curve(zip(self.dense, dense, strict=True)),
            head=Curve(zip((0.0, *self.head), head, strict=True)),
            attention=AttentionFormula(a, b, c, d, rates),
            block_move=(next(at), next(at)),
            block_copy=(next(at), next(at)),
        )


def fit_profile(steps: Sequence[StepRecord], *, model: str, machine: Mapping[str, str]) -> Profile:
    """Fit a profile to the steps of real runs, every fifth of them held out.

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
        host=fit_host(training),
        origin=f"fitted to {len(training)} recorded steps",
    )
    return replace(profile, held_out=sample_error(profile, held))


def fit_samples(samples: Sequence[Sample], basis: Basis, *, model: str, machine: Mapping[str, str]) -> Profile:
    """Fit the execute times; the profile's host time is 0."""
    times = np.array([sample.execute for sample in samples])
    rows = np.array([basis.features(sample.work) for sample in samples])
    pairs = sum(t * (k + (t + 1) / 2) for sample in samples for t, k in sample.work.prefills)
    prefill = sum(sample.execute for sample in samples if sample.work.prefills)
    smooth = basis.smoothness(prefill / pairs if pairs else 1.0)
    return basis.profile(_solve(rows, times, times, smooth), model, machine)


def fit_host(samples: Sequence[Sample]) -> tuple[float, float]:
    """a + b rows seconds of host time, errors taken relative to the whole step."""
    rows = np.array([[1.0, sample.work.sequences] for sample in samples])
    host = np.array([sample.host for sample in samples])
    a, b = _solve(rows, host, np.array([sample.total for sample in samples]))
    return float(a), float(b)


def refine(profile: Profile, samples: Sequence[Sample]) -> Profile:
    """Fit a measured profile once more, to the steps of real runs: how much of each part they take, and host time.

    What designed batches cannot show (rows that stay from step to step, the policy's own time, caches that are warm)
    goes into four factors, which are pulled towards 1, and into the host's a + b rows. Every fifth step is held out.

    Args:
        profile: measured; its attention is a formula.
        samples: of ordinary serving.

    Raises:
        ValueError: attention is a table.
    """
    if not isinstance(profile.attention, AttentionFormula):
        raise ValueError("only a profile whose attention is a formula can be refined; this one has a table")
    samples, held = every_fifth(samples)
    bare = ProfiledCost(replace(profile, host=(0.0, 0.0)))
    rows = np.array([[*bare.parts(sample.work), 1.0, sample.work.sequences] for sample in samples])
    times = np.array([sample.total for sample in samples])
    # the host's own times are measured, so they hold a and b where execution leaves them open
    a, b = fit_host(samples)
    typical = float(np.median(times))
    known = np.array([1.0, 1.0, 1.0, 1.0, a, b])
    scale = np.array([1.0, 1.0, 1.0, 1.0, typical, typical / max(1.0, rows[:, 5].mean())])
    pull = _NEAR_ONE * np.diag(1 / scale)
    dense, head, decode, prefill, a, b = (float(x) for x in _solve(rows, times, times, pull, pull @ known))
    own = profile.attention
    attention = AttentionFormula(
        own.base * decode, own.per_row * decode, own.per_token * decode, own.per_longest * decode,
        {point: rate * prefill for point, rate in own.prefill.items()},
    )  # fmt: skip
    refined = replace(
        profile,
        dense=Curve((x, y * dense) for x, y in profile.dense.points),
        head=Curve((x, y * head) for x, y in profile.head.points),
        attention=attention,
        host=(a, b),
        origin=f"{profile.origin}; refined on {len(samples)} recorded steps",
    )
    return replace(refined, held_out=sample_error(refined, held))


def step_error(profile: Profile, steps: Iterable[StepRecord]) -> dict[str, float]:
    """How far a profile is from recorded steps, given their batches; a step's time is finished - started.

    Returns:
        As `sample_error`.
    """
    return sample_error(profile, [Sample.of(step) for step in steps])


def sample_error(profile: Profile, samples: Sequence[Sample], *, host: bool = True) -> dict[str, float]:
    """How far a profile is from measured steps, of the whole step or (host=False) of its execution.

    Returns:
        `steps`, and as shares of the step time `mape` (mean absolute error), `bias` (mean signed error) and
        `total_bias` (signed error of the summed time); NaN without steps.
    """
    cost = ProfiledCost(profile if host else replace(profile, host=(0.0, 0.0)))
    real = np.array([sample.total if host else sample.execute for sample in samples])
    priced = np.array([cost.price(sample.work) for sample in samples])
    if not len(samples):
        return {"steps": 0, "mape": float("nan"), "bias": float("nan"), "total_bias": float("nan")}
    errors = priced / real - 1.0
    return {
        "steps": len(samples),
        "mape": float(np.abs(errors).mean()),
        "bias": float(errors.mean()),
        "total_bias": float(priced.sum() / real.sum() - 1.0),
    }


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


def _solve(
    rows: np.ndarray,
    times: np.ndarray,
    weights: np.ndarray,
    extra: np.ndarray | None = None,
    extra_target: np.ndarray | None = None,
) -> np.ndarray:
    """x >= 0 that makes |rows x - times| / weights small, robustly, beside |extra x - extra_target|."""
    rows, target = rows / weights[:, None], times / weights
    if extra is None or not len(extra):
        extra, extra_target = np.zeros((0, rows.shape[1])), np.zeros(0)
    elif extra_target is None:
        extra_target = np.zeros(len(extra))
    scale = np.abs(np.concatenate((rows, extra))).max(axis=0)
    scale[scale == 0] = 1.0
    counts = np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(counts)
        stacked = np.concatenate((rows * root[:, None], extra * np.sqrt(len(rows)))) / scale
        solution, _ = nnls(stacked, np.concatenate((target * root, extra_target * np.sqrt(len(rows)))))
        residuals = np.abs(rows / scale @ solution - target)
        limit = _HUBER * 1.4826 * float(np.median(residuals))
        if limit < 1e-9:
            break
        counts = np.minimum(1.0, limit / np.maximum(residuals, 1e-300))
    return solution / scale


def _ramps(value: float, knots: Sequence[float]) -> list[float]:
    """How much of each piece between knots lies below `value`; the last piece goes on beyond its end."""
    pieces = [min(max(value - left, 0.0), right - left) for left, right in pairwise(knots)]
    if pieces and value > knots[-1]:
        pieces[-1] = value - knots[-2]
    return pieces


def _heights(base: float, slopes: Sequence[float], knots: Sequence[float]) -> list[float]:
    return [base, *(float(y) for y in base + np.cumsum(np.array(slopes) * np.diff(knots)))]


def _weights(value: float, points: Sequence[float]) -> list[tuple[int, float]]:
    """(index, share) of the points that linear interpolation takes at `value`; constant beyond the ends."""
    if value <= points[0]:
        return [(0, 1.0)]
    if value >= points[-1]:
        return [(len(points) - 1, 1.0)]
    right = next(at for at, point in enumerate(points) if point > value)
    share = (value - points[right - 1]) / (points[right] - points[right - 1])
    return [(right - 1, 1.0 - share), (right, share)]


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
