"""Times designed batches, block moves and a stretch of ordinary serving on a real engine, as its records tell them.

A designed batch is a step of the unchanged engine under a scheduler that does as it is told. Its requests arrive with
their contexts (`computed_tokens`), of which only the size matters: the cache is all zeros.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from research_engine.calibration.designs import Design
from research_engine.engine.contract import Batch, EngineView, Executor, Request, SchedulePlan, Scheduler, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.records import StepRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.cost_model import Work
from research_engine.simulation.fit import Sample

REPEATS = 3  # steps of a design in one pass; their median counts
WARM_BELOW = 0.25  # a design whose first step is shorter than this is measured after it, with everything in place
WARM_STEPS = 20  # of ordinary serving, thrown away
MOVES = (1, 2, 4, 8, 16, 32, 64)


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
    """An executor that waits for its device, and for which KV from elsewhere is whatever its cache holds.

    Attributes:
        handover: seconds that the last batch took to be handed over; 0 where that computes it.
    """

    def __init__(self, executor: Executor, wait: Callable[[], None]) -> None:
        self._executor, self._wait = executor, wait
        self.handover = 0.0

    def execute(self, batch: Batch) -> StepResult:
        batch.received.clear()
        begin = time.perf_counter()
        pending = self._executor.execute(batch)
        seconds = time.perf_counter() - begin
        self.handover = 0.0 if isinstance(pending, StepResult) else seconds
        result = pending.wait()
        self._wait()
        return result

    def shutdown(self) -> None:
        self._executor.shutdown()


class Bench:
    """Measures on one engine's executor; the engine itself is not used.

    Args:
        engine: with nothing unfinished; its executor has the attribute `kv_cache`, a tensor, which is set to 0.
        wait: returns when the device has done all its work.
        always_warm: throw the first step of every design away, however long it took: a GPU captures graphs and chooses
            kernels in it.
        seed: of token ids.
    """

    def __init__(self, engine: Engine, wait: Callable[[], None], *, always_warm: bool = False, seed: int = 0) -> None:
        self._always_warm = always_warm
        self._config = replace(engine.config, overlap=False)  # so that a step's time is its own
        self._inner, self._wait = engine.executor, wait
        rng = random.Random(seed)
        size = self._config.vocab_size
        self._tokens = [rng.randrange(size) for _ in range(self._config.max_model_len)]
        self._names = 0
        cache: Any = self._inner
        cache.kv_cache.zero_()

    def designed(self, design: Design) -> list[Sample]:
        """Times of some steps of a design, fewer where a first step takes long."""
        script = _AsTold()
        device = _Timed(self._inner, self._wait)
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
            sample = Sample.of(engine.records.steps[-1], device.handover)
            for name in chunks:
                engine.abort(name)
            if repeat == 0 and (self._always_warm or sample.total < WARM_BELOW):
                continue
            samples.append(sample)
            if sample.total >= WARM_BELOW:
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
                for batch in (Batch(0, [], 0, swap_out=swaps), Batch(0, [], 0, swap_in=swaps)):
                    seconds = self._timed(batch)
                    samples.append(Sample(Work(0, 0, 0, blocks_moved=blocks), seconds, 0.0))
            if 2 * blocks <= device:
                seconds = self._timed(Batch(0, [], 0, copies=copies))
                samples.append(Sample(Work(0, 0, 0, blocks_copied=blocks), seconds, 0.0))
        return samples

    def served(self, scheduler: Scheduler, *, seed: int = 0) -> Iterator[Sample]:
        """Steps of ordinary serving without end: waves of a quarter more than 1, 2, 4 ... and all requests at once.

        Prompts and outputs have log-normal lengths of ShareGPT's kind, bounded by what the engine takes.
        """
        rng = random.Random(seed)
        device = _Timed(self._inner, self._wait)
        engine = Engine(self._config, scheduler, device)
        most = self._config.max_num_seqs
        waves = [size for size in (2**power for power in range(20)) if size < most] + [most, most]
        for number in count():
            wave = waves[number] if number < len(waves) else rng.choice(waves)
            for _ in range(wave + wave // 4):
                self._add_drawn(engine, rng)
            while engine.has_unfinished:
                engine.step()
                if engine.num_steps > WARM_STEPS:
                    yield Sample.of(engine.records.steps[-1], device.handover)

    def _add_drawn(self, engine: Engine, rng: random.Random) -> None:
        room = min(self._config.max_model_len - 2, self._config.num_slots - 1)
        prompt = min(max(4, int(rng.lognormvariate(4.7, 1.2))), room // 2)
        output = min(max(4, int(rng.lognormvariate(4.6, 0.9))), room - prompt)
        self._names += 1
        ids = [rng.randrange(self._config.vocab_size) for _ in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine.add_request(str(self._names), ids, sampling)

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


def median_sample(samples: Sequence[Sample]) -> Sample:
    """The work in the middle, with the median times."""
    execute = statistics.median(sample.execute for sample in samples)
    return Sample(samples[len(samples) // 2].work, execute, statistics.median(sample.host for sample in samples))
