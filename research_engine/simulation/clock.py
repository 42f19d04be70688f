"""Virtual time: moves when a simulated step says so, or when nothing is to do until the next arrival."""

from __future__ import annotations

import math


class VirtualClock:
    """An `engine.contract.Clock` whose seconds cost nothing; never goes back.

    Args:
        start: the first reading.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep_until(self, when: float) -> None:
        """Jump to `when`; stays where it is when that is past."""
        self.reach(when)

    def reach(self, when: float) -> None:
        """Let time pass until `when`, exactly; nothing happens when that is past."""
        self._now = max(self._now, when)

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: a negative or infinite time, or NaN.
        """
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"seconds = {seconds!r}: time must advance by a finite number >= 0")
        self._now += seconds
