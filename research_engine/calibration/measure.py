"""Times designed batches and block moves on a real engine's executor: the device's part and the host's, each by itself.

A designed batch is a step of the unchanged engine under a scheduler that does as it is told. Its requests arrive with
their contexts (`computed_tokens`), of which only the size matters: the cache is filled with noise.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from research_engine.calibration.designs import Design
from research_engine.calibration.device_timer import FIRST_HOLD, DeviceTimer
from research_engine.engine.contract import Batch, EngineView, Executor, Request, SchedulePlan, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.records import StepRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cost_model import Work
from research_engine.simulation.fit import Sample

REPEATS = 3  # steps of a design in one pass; their median counts
WARM_BELOW = 0.25  # a design whose first step is shorter than this is measured after it, with everything in place
MOVES = (1, 2, 4, 8, 16, 32, 64)
_HOLD_MARGIN, _MOST_HOLD = 1e-3, 0.1


class _AsTold:
    """A Scheduler that schedules what it is given."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def schedule(self, view: EngineView) -> SchedulePlan:
        return SchedulePlan(self.tokens)

    def on_arrival(self, request: Request) -> None:
        pass

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_finish(self, request: Request) -> None:
        pass


class _Timed:
    """An executor that times its device, and for which KV from elsewhere is whatever its cache holds.

    Attributes:
        device: seconds that the device took for the last batch; NaN where it did not find all of it at once.
        handover: seconds until it had been given all of it; 0 where the host is the device.
    """

    def __init__(self, executor: Executor, timer: DeviceTimer) -> None:
        self._executor, self._timer = executor, timer
        self._hold = FIRST_HOLD
        self.device = self.handover = 0.0

    def execute(self, batch: Batch) -> StepResult:
        batch.received.clear()
        self._timer.begin(self._hold)
        begin = time.perf_counter()
        pending = self._executor.execute(batch)
        self.handover = time.perf_counter() - begin
        self._timer.end()
        result = pending.wait()
        self.device = self._timer.seconds()
        if not self._timer.apart:
            self.handover = 0.0
        elif self.handover > self._hold:
            self.device = math.nan
        self._hold = min(_MOST_HOLD, 2 * self.handover + _HOLD_MARGIN)
        return result

    def shutdown(self) -> None:
        self._executor.shutdown()


class Bench:
    """Measures on one engine's executor; the engine itself is not used.

    Args:
        engine: with nothing unfinished; its executor has the attribute `kv_cache`, a tensor, which is overwritten.
        timer: of the executor's device.
        wait: returns when the device has done all its work.
        always_warm: throw the first step of every design away, however long it took: a GPU captures graphs and chooses
            kernels in it.
        seed: of token ids.
    """

    def __init__(
        self,
        engine: Engine,
        timer: DeviceTimer,
        wait: Callable[[], None],
        *,
        always_warm: bool = False,
        seed: int = 0,
    ) -> None:
        self._always_warm = always_warm
        self._config = replace(engine.config, overlap=False)  # so that a step's time is its own
        self._inner, self._timer, self._wait = engine.executor, timer, wait
        rng = random.Random(seed)
        size = self._config.vocab_size
        self._tokens = [rng.randrange(size) for _ in range(self._config.max_model_len)]
        self._names = 0
        executor: Any = self._inner
        fill(executor.kv_cache)

    def designed(self, design: Design) -> list[Sample]:
        """Times of some steps of a design, fewer where a first step takes long."""
        script = _AsTold()
        device = _Timed(self._inner, self._timer)
        engine = Engine(self._config, script, device)
        staying = [self._add(engine, kv, kv - 1, REPEATS + 4).id for kv in design.decodes]
        if staying:
            script.tokens = dict.fromkeys(staying, 1)
            engine.step()  # admits them; from now on they stay
        samples = []
        for repeat in range(REPEATS + 1):
            chunks = {
                self._add(engine, before + tokens + (not draws), before, 1).id: tokens
                for tokens, before, draws in design.chunks
            }
            script.tokens = dict.fromkeys(staying, 1) | chunks
            engine.step()
            sample = Sample.of(engine.records.steps[-1])._replace(device=device.device, handover=device.handover)
            for name in chunks:
                engine.abort(name)
            if repeat == 0 and (self._always_warm or sample.device < WARM_BELOW):
                continue
            samples.append(sample)
            if sample.device >= WARM_BELOW:
                break
        for name in staying:
            engine.abort(name)
        return samples

    def moves(self) -> list[Sample]:
        """Times of swapping and of copying blocks."""
        device, host = self._config.num_blocks, self._config.num_host_blocks
        samples = []
        for blocks in MOVES:
            swaps = [(block, block) for block in range(blocks)]
            copies = [(block, blocks + block) for block in range(blocks)]
            if blocks <= min(device, host):
                both = (Batch(0, [], 0, swap_out=swaps), Batch(0, [], 0, swap_in=swaps))
                samples += [Sample(Work(0, 0, 0, blocks_moved=blocks), self._timed(batch)) for batch in both]
            if 2 * blocks <= device:
                samples.append(Sample(Work(0, 0, 0, blocks_copied=blocks), self._timed(Batch(0, [], 0, copies=copies))))
        return samples

    def _add(self, engine: Engine, length: int, computed: int, max_tokens: int) -> Request:
        self._names += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompt = self._tokens[:length]
        return engine.add_request(str(self._names), prompt, sampling, computed_tokens=computed)[0]

    def _timed(self, batch: Batch) -> float:
        times = []
        for _ in range(REPEATS + 1):
            self._wait()
            begin = time.perf_counter()
            self._inner.execute(batch).wait()
            self._wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])


def fill(cache: Any) -> None:
    """Mutates: noise in a cache of KV, since a device may take less time and power over zeros; zeros if quantised."""
    if cache.is_floating_point() and cache.element_size() >= 2:
        for layer in cache:  # all at once takes a GPU's random numbers more memory than the cache
            layer.uniform_(-1.0, 1.0)
    else:
        cache.zero_()


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The work in the middle, with the median times; the device's is NaN if it was never seen."""
    seen = [sample.device for sample in samples if not math.isnan(sample.device)]
    return samples[len(samples) // 2]._replace(
        device=statistics.median(seen) if seen else math.nan,
        handover=statistics.median(sample.handover for sample in samples),
    )
