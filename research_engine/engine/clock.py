"""Real time for the engine; the virtual clock of the simulator has the same two methods."""

from __future__ import annotations

import time


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
