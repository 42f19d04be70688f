"""From the records of real steps to a profile, by non-negative least squares, with its error on steps held out.

    seconds = a + b rows + ramps(tokens) + c sum(kv) + d max(kv) + e pairs + f blocks moved + g blocks copied

kv are the contexts of the rows of one token, pairs the causal query-key pairs of the others. `ramps` is piecewise
linear and never falls. Errors are weighted by 1 / seconds, so that short steps count as much as long ones. All
coefficients are >= 0 (Lawson and Hanson, "Solving Least Squares Problems", 1974, ch. 23): a model that gets cheaper
with work is wrong off its data, however well it fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.optimize import nnls

from research_engine.engine.records import StepRecord

from .attention_cost import AttentionFormula
from .cost_model import Work, work_of_record
from .curve import Curve
from .profiled import Profile, ProfiledCost

HOLD_OUT_EVERY = 5
MIN_STEPS = 40
STEPS_PER_KNOT = 5
_SCALARS = 7  # a, b, c, d, e, f, g


def fit_profile(steps: Sequence[StepRecord], *, model: str, machine: Mapping[str, str]) -> Profile:
    """Fit a profile to the steps of real runs, every fifth of them held out.

    A step's time is finished - started: scheduling, execution and update.

    Args:
        steps: of one model on one machine, warm; at least 40 with rows.
        model, machine: as `Profile` stores them.

    Raises:
        ValueError: too few steps, or one that took no time.
    """
    used = [step for step in steps if step.request_ids]
    if len(used) < MIN_STEPS:
        raise ValueError(f"{len(used)} steps with rows: a fit needs at least {MIN_STEPS}")
    times = np.array([step.finished - step.started for step in used])
    if not (times > 0).all():
        bad = used[int(np.argmin(times))]
        raise ValueError(f"step {bad.step} took {times.min()} s; real steps take time")
    works = [work_of_record(step) for step in used]
    held = np.arange(len(used)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
    training = [work for work, out in zip(works, held, strict=True) if not out]
    profile = _fit(training, times[~held], model, machine)
    return replace(profile, held_out=step_error(profile, [step for step, out in zip(used, held, strict=True) if out]))


def step_error(profile: Profile, steps: Sequence[StepRecord]) -> dict[str, float]:
    """How far a profile is from recorded steps, given their batches.

    Returns:
        `steps`, and as shares of the step time `mape` (mean absolute error) and `bias` (mean signed error).
    """
    cost = ProfiledCost(profile)
    errors = np.array([cost.price(work_of_record(step)) / (step.finished - step.started) - 1.0 for step in steps])
    return {"steps": len(errors), "mape": float(np.abs(errors).mean()), "bias": float(errors.mean())}


def _fit(works: Sequence[Work], times: np.ndarray, model: str, machine: Mapping[str, str]) -> Profile:
    knots = _knots(sorted(work.tokens for work in works))
    features = np.array([_features(work, knots) for work in works]) / times[:, None]
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(features / scale, np.ones(len(works)))
    values = [float(value) for value in solution / scale]
    base, per_row, per_token, per_longest, pair, moved, copied = values[:_SCALARS]
    heights = np.concatenate(([0.0], np.cumsum(np.array(values[_SCALARS:]) * np.diff(knots))))
    return Profile(
        model=model,
        machine=machine,
        dense=Curve(zip(knots, map(float, heights), strict=True)),
        head=Curve([(0, 0.0)]),
        attention=AttentionFormula(0.0, 0.0, per_token, per_longest, {(1, 0): pair}),
        host=(base, per_row),
        block_move=moved,
        block_copy=copied,
        origin=f"fitted to {len(works)} recorded steps",
    )


def _features(work: Work, knots: Sequence[float]) -> list[float]:
    pairs = sum(tokens * (before + (tokens + 1) / 2) for tokens, before in work.prefills)
    ramps = [min(max(work.tokens - left, 0.0), right - left) for left, right in pairwise(knots)]
    scalars = [1.0, work.sequences, work.decode_kv, work.decode_kv_max, pairs, work.blocks_moved, work.blocks_copied]
    return [*scalars, *ramps]


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
