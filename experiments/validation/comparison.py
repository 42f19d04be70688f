"""Recorded runs against their simulation: signed errors, step errors with the real batches, ranks of policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import schedulers
from experiments.validation.recording import RecordedRun, Recording
from research_engine import metrics
from research_engine.engine.driver import replay
from research_engine.engine.records import RequestRecord
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.cost_model import StepTime, Work
from research_engine.simulation.fit import run_error
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.streamed_records import StreamedRecords

LATENCIES: Mapping[str, Callable[[RequestRecord], float]] = {
    "ttft": metrics.ttft, "tpot": metrics.tpot, "e2e": metrics.e2e,
}  # fmt: skip
POINTS = ("mean", "p50", "p90", "p99")
ALIKE_WITHIN = 0.02
DRAWS = 10  # simulations by chance


@dataclass(frozen=True)
class RunComparison:
    """A recorded run and its simulation.

    Attributes:
        run: the recorded one.
        simulated: the simulation's requests.
        real_metrics, simulated_metrics: "ttft.p99" and the like -> seconds, "throughput" -> output tokens per second.
        forced: the step error with the real batches (teacher-forced), as `timeline.step_error` tells it.
        num_steps: of the simulation.
        by_chance: metric -> least and most of the signed error, when the device takes each step longer or shorter at
            random by as much as the profile is off on held-out steps; empty where it does not say by how much.
    """

    run: RecordedRun
    simulated: list[RequestRecord]
    real_metrics: Mapping[str, float]
    simulated_metrics: Mapping[str, float]
    forced: Mapping[str, float]
    num_steps: int
    by_chance: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def error(self, metric: str) -> float:
        """Signed, as a share of the real value."""
        return self.simulated_metrics[metric] / self.real_metrics[metric] - 1


@dataclass(frozen=True)
class RankAgreement:
    """Whether the simulation ranks the policies as reality does, at one load.

    Attributes:
        load: share of the capacity.
        pairs: pairs of policies and metrics; alike: those that it puts in the real order.
        clear_pairs, clear_alike: the same among pairs that in reality are more than 2 % apart.
        swapped: in words, clear pairs in the wrong order.
        same: two policies that make the same decisions in the simulation, so that there is no order to agree on, and by
            which share their real runs differ at most, in which metric. They are not in the pairs.
    """

    load: float
    pairs: int
    alike: int
    clear_pairs: int
    clear_alike: int
    swapped: tuple[str, ...]
    same: tuple[tuple[str, str, float, str], ...] = ()


def compare(recording: Recording, profile: Profile) -> list[RunComparison]:
    """Simulate every recorded run, free-running: same arrivals, lengths, policy and engine, times by the profile."""
    return [compare_run(recording, run, profile) for run in recording.runs]


def compare_run(recording: Recording, run: RecordedRun, profile: Profile) -> RunComparison:
    """Simulate one recorded run; and as often as `DRAWS` with steps that take longer or shorter by chance.

    Raises:
        ValueError: the policy cannot be made.
    """
    records, simulated_metrics = _simulate(recording, run, ProfiledCost(profile))
    real_metrics = run_metrics(run.requests, run.end)
    deviation = profile.held_out.get("mape", 0.0)  # NaN where no step was held out
    draws = DRAWS if 0.0 < deviation <= 1.0 else 0
    drawn = [_simulate(recording, run, _Noisy(profile, deviation, seed))[1] for seed in range(draws)]
    errors = {metric: [own[metric] / real - 1 for own in drawn] for metric, real in real_metrics.items()}
    return RunComparison(
        run,
        records.requests,
        real_metrics,
        simulated_metrics,
        run_error(profile, [step.timed for step in run.steps], overlap=recording.engine.overlap),
        records.num_steps,
        {metric: (min(own), max(own)) for metric, own in errors.items() if own},
    )


def _simulate(
    recording: Recording, run: RecordedRun, cost: ProfiledCost
) -> tuple[StreamedRecords, Mapping[str, float]]:
    """What a run's arrivals give under these costs: records and metrics."""
    # prompts are made up and no token is ever drawn that ends a request, so vocabulary and end tokens have no meaning
    config = replace(recording.engine, vocab_size=0, eos_token_ids=(), enable_prefix_caching=False)
    records = StreamedRecords()
    scheduler = schedulers.create(run.scheduler, **run.parameters)
    report = replay(simulated_engine(config, scheduler, cost, records=records), run.arrivals)
    return records, run_metrics(records.requests, report.end)


class _Noisy(ProfiledCost):
    """A profile whose every step takes the device longer or shorter by chance, each by itself.

    Args:
        deviation: of the normal distribution of the share.
    """

    def __init__(self, profile: Profile, deviation: float, seed: int) -> None:
        super().__init__(profile)
        self._normal, self._deviation = random.Random(seed).gauss, deviation

    def time_of(self, work: Work) -> StepTime:
        time = super().time_of(work)
        return time._replace(device=time.device * max(0.0, 1.0 + self._normal(0.0, self._deviation)))


def run_metrics(requests: Sequence[RequestRecord], end: float) -> dict[str, float]:
    """Latencies of completed requests by percentile, and output tokens per second from 0 to `end`."""
    done = [record for record in requests if metrics.is_completed(record)]
    found = {"throughput": sum(record.output_tokens for record in done) / end}
    for name, metric in LATENCIES.items():
        values = metrics.percentiles(map(metric, done))
        found |= {f"{name}.{point}": values[point] for point in POINTS}
    return found


def rank_agreement(comparisons: Sequence[RunComparison]) -> list[RankAgreement]:
    """At each load, over every pair of policies and the P50 and P99 of each latency; one policy has no ranks."""
    found = []
    for load in sorted({comparison.run.load for comparison in comparisons}):
        members = [comparison for comparison in comparisons if comparison.run.load == load]
        pairs = alike = clear = clear_alike = 0
        swapped, same = [], []
        metrics_ranked = [f"{name}.{point}" for name in LATENCIES for point in ("p50", "p99")]
        for one, other in combinations(members, 2):
            if one.simulated_metrics == other.simulated_metrics:
                apart_by = {m: abs(one.real_metrics[m] / other.real_metrics[m] - 1) for m in metrics_ranked}
                widest = max(apart_by, key=apart_by.__getitem__)
                same.append((one.run.scheduler, other.run.scheduler, apart_by[widest], widest.upper()))
                continue
            for metric in metrics_ranked:
                real = one.real_metrics[metric] / other.real_metrics[metric]
                simulated = one.simulated_metrics[metric] / other.simulated_metrics[metric]
                ordered = (real - 1) * (simulated - 1) > 0 or real == simulated
                apart = abs(real - 1) > ALIKE_WITHIN
                pairs, alike = pairs + 1, alike + ordered
                clear, clear_alike = clear + apart, clear_alike + (apart and ordered)
                if apart and not ordered:
                    names = f"{one.run.scheduler} / {other.run.scheduler}"
                    swapped.append(f"{metric.upper()} of {names}: {real:.3f} real, {simulated:.3f} simulated")
        if pairs or same:
            found.append(RankAgreement(load, pairs, alike, clear, clear_alike, tuple(swapped), tuple(same)))
    return found
