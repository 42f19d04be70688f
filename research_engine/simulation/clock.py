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
        self._owed = 0.0

    def now(self) -> float:
        now = self._now
        if self._owed:
            self._now, self._owed = now + self._owed, 0.0
        return now

    def sleep_until(self, when: float) -> None:
        """Jump to `when`; stays where it is when that is past."""
        self.reach(when)

    def reach(self, when: float) -> None:
        """Let time pass until `when`, exactly; nothing happens when that is past."""
        self._now = max(self._now + self._owed, when)
        self._owed = 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: a negative or infinite time, or NaN.
        """
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"seconds = {seconds!r}: time must advance by a finite number >= 0")
        self._now += self._owed + seconds
        self._owed = 0.0

    def advance_after_reading(self, seconds: float) -> None:
        """Let time pass as soon as the present moment has been read once: what its reader then does takes that long.

        An engine reads the clock when a step's tokens are out, and gives them away, ends requests and keeps its books
        after that.

        Raises:
            ValueError: as `advance`.
        """
        if not 0.0 <= seconds < math.inf:
            raise ValueError(f"seconds = {seconds!r}: time must advance by a finite number >= 0")
        self._owed += seconds
