"""Real time for the engine; the virtual clock of the simulator has the same two methods."""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage


class MonotonicClock:
    """Seconds since the clock was made; never goes back."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def sleep_until(self, when: float) -> None:
        """Block until `now() >= when`; returns at once when that is past."""
        while (left := when - self.now()) > 0:
            time.sleep(left)


class Stopwatch:
    """How long a call took: real seconds if its thread slept or waited in it, else those in which it computed.

    So a busy machine that gives the thread no core isn't blamed on the call. Where the system doesn't count a thread's
    waits, real seconds are taken.
    """

    def start(self) -> None:
        self._waits = self._count_waits()
        self._computed = time.thread_time()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Since `start`, which must have been called in the same thread."""
        elapsed = time.perf_counter() - self._began
        waited = self._waits is None or self._count_waits() != self._waits
        return elapsed if waited else time.thread_time() - self._computed

    @staticmethod
    def _count_waits() -> int | None:
        """How often this thread has given its core up by itself."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else None
