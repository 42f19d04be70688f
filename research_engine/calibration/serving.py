"""A stretch of ordinary serving on a real engine, step by step: what the host did, what the device did, and when."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from typing import NamedTuple

from research_engine.engine.clock import MonotonicClock
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, Clock, Executor, Pending, Scheduler, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.records import StepRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cost_model import work_of_record
from research_engine.simulation.fit import Sample
from research_engine.simulation.power import PowerState
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import Ladders, StepKind
from research_engine.simulation.timeline import TimedStep

STRETCH = 48  # steps with about as many requests at once
WARM_STEPS = 24  # of all of them, thrown away
WAITED = 2e-4  # seconds of waiting for a result, above what reading takes, from which on the device ended the step
_ARRIVES = 0.4  # chance that a free place is taken in a step


class Served(NamedTuple):
    """One step.

    Attributes:
        stretch: number of its stretch; steps of one come one after the other.
        sample: its parts, as far as they were seen by themselves.
        timed: when it began and ended.
    """

    stretch: int
    sample: Sample
    timed: TimedStep


class _Watched:
    """An executor that notes how long each batch's handover took, and from when on its result was waited for."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self._executor, self._clock = executor, clock
        self.handed: dict[int, float] = {}
        self.waits_from: dict[int, float] = {}

    def execute(self, batch: Batch) -> Pending:
        pending = self._executor.execute(batch)
        self.handed[batch.step] = self._clock.now()
        return _WatchedStep(pending, batch.step, self)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def now(self) -> float:
        return self._clock.now()


class _WatchedStep:
    def __init__(self, pending: Pending, step: int, watch: _Watched) -> None:
        self._pending, self._step, self._watch = pending, step, watch

    def wait(self) -> StepResult:
        self._watch.waits_from[self._step] = self._watch.now()
        return self._pending.wait()


def serve(
    config: EngineConfig,
    executor: Executor,
    scheduler: Scheduler,
    *,
    apart: bool,
    ladders: Ladders,
    clock: Clock | None = None,
    seed: int = 0,
) -> Iterator[Served]:
    """Steps without end: stretches with 1, 2, 4 ... and all places taken, then with random numbers of them.

    A place that a request leaves is soon taken by another, so that prompts join running answers as they do under load.
    Prompts and outputs have log-normal lengths of ShareGPT's kind, bounded by what the engine takes.

    Args:
        config: of the engine, its overlap included.
        apart: the device works by itself, while the host goes on.
        ladders: of the executor.
        clock: the executor's; real time when None.
        seed: of lengths, token ids and places.
    """
    rng = random.Random(seed)
    clock = MonotonicClock() if clock is None else clock
    watch = _Watched(executor, clock)
    engine = Engine(config, scheduler, watch, clock=clock)
    most = config.max_num_seqs
    levels = [size for size in (2**power for power in range(20)) if size < most] + [most]
    names, num_steps, seen = count(), 0, 0
    before: StepRecord | None = None
    for stretch in count():
        anywhere = rng.randint(1, most) if stretch % 2 else round(math.exp(rng.uniform(0.0, math.log(most))))
        places = levels[stretch] if stretch < len(levels) else anywhere
        for step in range(STRETCH):
            free = places - engine.num_unfinished
            for _ in range(free if step == 0 else sum(rng.random() < _ARRIVES for _ in range(free))):
                _add_drawn(engine, rng, str(next(names)))
            if not engine.has_unfinished:
                _add_drawn(engine, rng, str(next(names)))
            engine.step()
            returned, num_steps = clock.now(), num_steps + 1
            for record in engine.records.steps[seen:]:
                if not record.request_ids:
                    continue
                if num_steps > WARM_STEPS:
                    yield Served(
                        stretch, _sample(record, before, returned, watch, config, ladders, apart), _timed(record)
                    )
                before = record
            seen = len(engine.records.steps)


def _timed(record: StepRecord) -> TimedStep:
    return TimedStep(work_of_record(record), record.started, record.executed, record.finished)


def _sample(
    record: StepRecord, before: StepRecord | None, returned: float, watch: _Watched, config: EngineConfig,
    ladders: Ladders, apart: bool,
) -> Sample:  # fmt: skip
    """The parts of a step; `returned` is when the engine was ready for the next one.

    Of a device that works by itself, a step's time was seen where the host waited for its end, and where its beginning
    is known: with the end of the step before it, waited for as well, if it had been handed over by then; otherwise the
    device was free when it came, and begins a graph at once.
    """
    work, handed = work_of_record(record), watch.handed.pop(record.step)
    own = Sample(
        work, math.nan, schedule=record.committed - record.started, handover=handed - record.committed,
        after=(returned if config.overlap else record.finished) - record.executed,
    )  # fmt: skip
    if not apart:
        watch.waits_from.pop(record.step)
        return own._replace(handover=0.0, device=record.executed - record.committed)
    if _waited(record, watch):
        if before is not None and before.executed >= handed and _waited(before, watch):
            own = own._replace(device=record.executed - before.executed)
        elif ladders.kind(work) is not StepKind.LAUNCHED:
            own = own._replace(device=record.executed - handed)
    if before is not None:
        watch.waits_from.pop(before.step, None)
    return own


def with_launched(served: Sequence[Served], profile: Profile) -> list[Served]:
    """The same steps of an engine that ran ahead, with device times of launched ones, too, by the help of a profile.

    While such a step is launched the device may still be busy with the one before, whose end nobody waited for. So that
    end is foretold, and the launched step begins with it, or with its own first kernels if these came later. Steps that
    ended with the host stay unseen.
    """
    cost, found = ProfiledCost(profile), list(served)
    power = None if cost.power_limit is None else PowerState(cost.power_limit)
    result_before = ready_before = -math.inf
    for at, (step, following) in enumerate(pairwise(served)):
        sample, timed = step.sample, step.timed
        kind = profile.ladders.kind(sample.work)
        handed = timed.started + sample.schedule + sample.handover
        time = cost.time_of(sample.work)
        launching = min(handed, timed.started + time.before) if kind is StepKind.LAUNCHED else handed
        free_at = result_before if result_before - handed > WAITED else min(ready_before, result_before)
        begin = max(launching, free_at)
        device = time.device if power is None else power.seconds(time, begin)
        waits_from = following.timed.started + following.sample.schedule + following.sample.handover
        waited = timed.executed - waits_from > WAITED
        if kind is StepKind.LAUNCHED and waited and math.isnan(sample.device) and ready_before > -math.inf:
            found[at] = step._replace(sample=sample._replace(device=timed.executed - begin))
        result_before = timed.executed
        ready_before = timed.executed if waited else begin + device
    return found


def _waited(record: StepRecord, watch: _Watched) -> bool:
    return record.executed - watch.waits_from.get(record.step, math.inf) > WAITED


def _add_drawn(engine: Engine, rng: random.Random, name: str) -> None:
    """Queue a request of random lengths."""
    config = engine.config
    room = min(config.max_model_len - 2, config.num_slots - 1)
    prompt = min(max(4, int(rng.lognormvariate(4.7, 1.2))), room // 2)
    output = min(max(4, int(rng.lognormvariate(4.6, 0.9))), room - prompt)
    ids = [rng.randrange(config.vocab_size) for _ in range(prompt)]
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    engine.add_request(name, ids, sampling)
