"""Sends requests when they are due and notes what comes back: open loop by absolute times, or a closed loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from research_engine.bench.backends import Call, Observation
from research_engine.bench.connection import ConnectionPool
from research_engine.bench.datasets import Sample

_TICK = 0.02  # seconds between looks at the event loop's lag
_PROGRESS_EVERY = 25  # ticks; drawing it takes the loop a millisecond or two


@dataclass(frozen=True)
class Load:
    """What is sent when.

    Attributes:
        samples, requests: what is asked, and the bytes of it, in order of arrival.
        arrivals: seconds after the start, ascending; None sends as fast as `max_concurrency` lets.
        streamed: answers come as streams.
        max_concurrency: requests under way at most; a request that is due waits.
        timeout: seconds after which a request has failed.
    """

    samples: Sequence[Sample]
    requests: Sequence[bytes]
    arrivals: Sequence[float] | None = None
    streamed: bool = True
    max_concurrency: int | None = None
    timeout: float = 6 * 3600.0


@dataclass
class LoadRun:
    """What came of it; times are the pool's clock.

    Attributes:
        observations: of every request that was due before the end, in order of arrival.
        start, end: when the load began, and when its last answer had ended.
        is_interrupted: `stop` was called; requests under way then are unfinished.
        loop_lags: seconds by which the event loop came late to a timer, 50 times a second.
        cpu_seconds: of this process in that time.
        connections: opened in that time.
    """

    observations: list[Observation]
    start: float
    end: float = 0.0
    is_interrupted: bool = False
    loop_lags: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    connections: int = 0


class LoadDriver:
    """Drives one load; `run` once.

    Args:
        pool: connections to the server, with the clock of all times.
        load: what to send.
        on_progress: called twice a second with (requests ended, requests under way).
    """

    def __init__(
        self, pool: ConnectionPool, load: Load, on_progress: Callable[[int, int], None] = lambda ended, under_way: None
    ) -> None:
        self._pool, self._load, self._on_progress = pool, load, on_progress
        self._clock = pool.clock
        self._under_way: dict[Call, None] = {}  # in the order in which they were sent
        self._waiting: deque[tuple[Observation, int]] = deque()
        self._ended = 0
        self._idle = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._sent_all = False
        self.result = LoadRun([], 0.0)

    def stop(self) -> None:
        """Send nothing more and give up what is under way; `run` then returns what there is."""
        self.result.is_interrupted = True
        if self._sender is not None:
            self._sender.cancel()
        self._waiting.clear()
        if self._load.arrivals is None:  # those without a place were not due yet
            self.result.observations = [seen for seen in self.result.observations if seen.sent is not None]
        for call in self._under_way:
            self._pool.cancel(call)
        self._under_way.clear()
        self._sent_all = True
        self._idle.set()

    async def run(self) -> LoadRun:
        """Send everything, wait for every answer."""
        result, loop = self.result, asyncio.get_running_loop()
        opened = self._pool.opened
        with _without_collector():
            result.start = self._clock()
            cpu = time.process_time()
            self._sender = loop.create_task(self._send())
            watch = loop.create_task(self._watch())
            try:
                await asyncio.wait([self._sender])
                if not self._sender.cancelled() and (error := self._sender.exception()) is not None:
                    raise error
                await self._idle.wait()
            finally:
                watch.cancel()
                self._sender.cancel()
            result.cpu_seconds = time.process_time() - cpu
        answered = [seen.finished for seen in result.observations if seen.finished is not None]
        result.end = self._clock() if result.is_interrupted else max(answered, default=result.start)
        result.connections = self._pool.opened - opened
        self._on_progress(self._ended, 0)
        return result

    async def _send(self) -> None:
        load, start, seen = self._load, self.result.start, self.result.observations
        for index, sample in enumerate(load.samples):
            if load.arrivals is None:
                observation = Observation(sample, start)
            else:
                due = start + load.arrivals[index]
                while (ahead := due - self._clock()) > 0:
                    await asyncio.sleep(ahead)
                observation = Observation(sample, due)
            seen.append(observation)
            if load.max_concurrency is not None and len(self._under_way) >= load.max_concurrency:
                self._waiting.append((observation, index))
            else:
                self._launch(observation, index)
            if load.arrivals is not None and index % 64 == 63:
                await asyncio.sleep(0)  # answers are read between arrivals that are all overdue
        self._sent_all = True
        if not self._under_way:
            self._idle.set()

    def _launch(self, observation: Observation, index: int) -> None:
        call = Call(observation, self._load.streamed, self._finished)
        self._under_way[call] = None
        observation.sent = self._clock()
        self._pool.send(self._load.requests[index], call)

    def _finished(self, call: Call) -> None:
        if self._under_way.pop(call, call) is call:
            return  # given up before
        self._ended += 1
        if self._waiting:
            observation, index = self._waiting.popleft()
            if self._load.arrivals is None:  # a closed loop: it is due when its place gets free
                observation.scheduled = self._clock()
            self._launch(observation, index)
        elif self._sent_all and not self._under_way:
            self._idle.set()

    async def _watch(self) -> None:
        """Lag of the loop, requests that ran out of time, progress."""
        ticks = 0
        while True:
            before = self._clock()
            await asyncio.sleep(_TICK)
            now = self._clock()
            self.result.loop_lags.append(max(0.0, now - before - _TICK))
            ticks += 1
            if ticks % _PROGRESS_EVERY == 0:
                self._on_progress(self._ended, len(self._under_way))
                self._expire(now)

    def _expire(self, now: float) -> None:
        late = []
        for call in self._under_way:
            if call.seen.sent is None or now - call.seen.sent < self._load.timeout:
                break
            late.append(call)
        for call in late:
            self._pool.cancel(call)
            call.on_failure(f"no whole answer within {self._load.timeout:g} s", now)


@contextmanager
def _without_collector() -> Iterator[None]:
    """A collection of garbage stops the client for milliseconds, which would be taken for the server's."""
    gc.collect()
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
